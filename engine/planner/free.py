"""Free mode: rings on a skyline, whole sequences on top, the best of a few tries; and the plan that comes of it.

Letters: S sequences in descending order, P ranks, K shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.planner import memory
from engine.planner.bound import Floats, least_degree
from engine.planner.emit import Placement, build
from engine.planner.plan import Ints, StepPlan
from engine.planner.problem import Problem
from engine.planner.rings import all_folded
from engine.planner.settings import PlanSettings
from engine.planner.shorts import deal, even_out, pack
from engine.planner.skyline import Rings, Rule, place_rings

_INF = float("inf")
_EVEN = (  # in shares of the bound: limit, join; stretch; tries; gap, top (skyline.Rule)
    (1.0, 0.0005, 1.0, 8, 0.05, 1.001),  # whole sequences will fill what rings leave open
    (1.0, 0.0005, 2.0, 8, 0.05, 1.002),  # rings must leave little open
)
_MORE = (
    (1.0, 0.0005, 1.5, 8, 0.05, 1.002),
    (1.0, 0.002, 3.0, 8, 0.1, 1.005),
    (0.9, 0.002, 1.0, 8, 0.05, 1.0),
    (0.75, 0.002, 1.5, 8, 0.05, 1.0),
    (0.5, 0.002, 1.0, 8, 0.05, 1.0),
)
_LATER = (1.02, 0.0005, 2.0, 8, 0.05, 1.02)  # rings bound by transfers need far fewer ranks where they may take longer
_LONG = (  # of few sequences a rank some ranks get two, and some ranks are slow: longer rings may lose nothing
    (1.1, 0.002, 1.0, 8, 0.05, 1.1),
    (1.25, 0.002, 1.0, 8, 0.05, 1.25),
    (1.5, 0.002, 1.0, 8, 0.05, 1.5),
)
_A_RANK = 4  # sequences that are few
_MUCH = 0.05  # share of the work in whole sequences from which the first rule goes first
_LARGE = 4096  # sequences from which two rules must do, and nearness is less near
_CLOSE, _CLOSE_IF_LARGE = 1.005, 1.01  # a candidate this near the bound is taken at once
_FEWER = 0.8  # of the ranks, which is far fewer
_PASSES = 16  # of swaps


@dataclass(frozen=True, eq=False)
class Candidate:
    """The first `placed` sequences on rings, and the rank of each of the others."""

    placed: int
    rings: Rings
    rings_height: Floats  # [P] of the rings alone
    rank_of: Ints
    height: Floats  # [P]

    @property
    def makespan(self) -> float:
        """Return when the last rank is done, ns."""
        return float(self.height.max())


def best_candidate(problem: Problem) -> Candidate:
    """Return the candidate that is done first."""
    low, large = problem.bound, len(problem.lengths) >= _LARGE
    close = low * (_CLOSE_IF_LARGE if large else _CLOSE)
    candidates: list[Candidate] = []
    for limit, join, stretch, tries, gap, top in _rules(problem, large):
        rule = Rule(limit * low, join * low, stretch, tries, gap * low, top * low)
        placed, rings, height = _place(problem, rule)
        if any(np.array_equal(height, other.rings_height) for other in candidates):
            continue
        candidates.append(_fill(problem, placed, rings, height))
        if not large:  # evened out, the first one is most often near enough
            _even_out(problem, candidates[-1])
        if candidates[-1].makespan <= close:
            break
    best = min(candidates, key=lambda candidate: candidate.makespan)
    if large:
        _even_out(problem, best)
    return best


def _rules(problem: Problem, large: bool) -> tuple[tuple[float, float, float, int, float, float], ...]:
    """Return the rules to try, in order."""
    longer = int((problem.lengths > problem.ranks.holds.min()).sum())
    even = _EVEN if problem.work(after=longer) > _MUCH * problem.work() else _EVEN[::-1]
    first = (*even, _LATER) if _shrinks(problem) else even
    if large:
        return first
    few = len(problem.lengths) <= _A_RANK * len(problem.ranks.slow)
    return first + _MORE + _LONG if few or problem.ranks.slow.max() > 1.0 else first + _MORE


def _shrinks(problem: Problem) -> bool:
    """Return whether the longest sequence needs far fewer ranks if it may take a little longer than the bound."""
    ranks, tokens = problem.ranks, float(problem.lengths[0])
    most = int((ranks.slow == ranks.slow.min()).sum())
    limits = problem.bound * 1.0001, problem.bound * _LATER[0]
    now, later = (least_degree(problem.rates, tokens, 1, most, ranks.node, ranks.share, limit) for limit in limits)
    return later < _FEWER * (now or most)


def _place(problem: Problem, rule: Rule) -> tuple[int, Rings, Floats]:
    count = len(problem.lengths)
    rings = Rings(np.ones(count, dtype=np.int64), np.zeros(count, dtype=np.int64), np.zeros(count))
    height = np.zeros(len(problem.ranks.slow))
    placed = place_rings(problem.rates, problem.lengths, problem.gain, problem.ranks, rule, rings, height)
    return placed, rings, height


def _fill(problem: Problem, placed: int, rings: Rings, height: Floats) -> Candidate:
    full = np.maximum(height, problem.first * problem.ranks.slow)  # or they go with a ring
    rank_of = deal(problem.times[placed:], problem.ranks.slow, full)
    return Candidate(placed, rings, height, rank_of, full)


def _even_out(problem: Problem, one: Candidate) -> None:
    even_out(problem.times[one.placed :], problem.ranks.slow, one.height, one.rank_of, problem.bound, _PASSES)


def plan_of(problem: Problem, best: Candidate, settings: PlanSettings) -> StepPlan:
    """Return the plan: rings along their start, then micro-batches of whole sequences, by their number in the rank."""
    rings, placed, lengths = best.rings, best.placed, problem.lengths
    group = np.empty(len(lengths), dtype=np.int64)
    group[np.argsort(rings.start[:placed], kind="stable")] = np.arange(placed)
    group[placed:] = placed + pack(lengths[placed:], best.rank_of, settings.capacities)
    ring = _with_ring(lengths, best, settings.capacities)
    group[placed:][ring >= 0] = group[ring[ring >= 0]]
    first = rings.first.copy()
    first[placed:] = best.rank_of
    return on_neighbours(problem, group, rings.degree, first, settings)


def _with_ring(lengths: Ints, best: Candidate, holds: Ints) -> Ints:
    """Return for each whole sequence the ring in whose micro-batch it goes, or -1, [W].

    Saves the fixed cost of a micro-batch. The ring must be the last of all its members, so that none waits for what
    another packs there, and each must have room for all of its whole sequences.
    """
    rings, placed = best.rings, best.placed
    degree, tokens = rings.degree[:placed], lengths[placed:]
    late = np.argsort(rings.start[:placed], kind="stable")
    members = np.repeat(rings.first[late] - np.cumsum(degree[late]) + degree[late], degree[late])
    last = np.full(len(holds), -1, dtype=np.int64)
    last[members + np.arange(len(members))] = np.repeat(late, degree[late])  # of one rank's rings the latest stays
    packed = np.bincount(best.rank_of, weights=tokens, minlength=len(holds)).astype(np.int64)
    part = np.append(-(-lengths[:placed] // degree), 0)  # and of no ring
    room = (last >= 0) & (packed + part[last] <= holds)
    whole = np.bincount(last[room], minlength=placed) == degree
    return np.where(np.append(whole, False)[last], last, -1)[best.rank_of]


def on_neighbours(problem: Problem, group: Ints, degree: Ints, first: Ints, settings: PlanSettings) -> StepPlan:
    """Return the plan of sequences in groups, on folded rings of neighbouring ranks; all [S]."""
    back = problem.back
    ring_start, ring_ranks = all_folded(first[back], degree[back])
    lengths = problem.lengths[back]
    offload = memory.of_rings(lengths, ring_start, ring_ranks, settings)
    placed = Placement(lengths, group[back], ring_start, ring_ranks, offload)
    return build("adaptive", settings.mode, settings.ranks, settings.capacity, placed, settings.stages)
