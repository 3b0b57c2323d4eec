"""Candidates for free mode: first rings on a skyline (skyline.py), then unsplit sequences on top (unsplit.py).

Letters: S sequences in descending order, P ranks, W unsplit sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.planner.adaptive.build import build_plan, uncut
from engine.planner.adaptive.skyline import Rings, Rule, place_rings
from engine.planner.adaptive.unsplit import deal, even_out, pack
from engine.planner.adaptive.workload import Workload
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.planner.time.bound import least_degree
from engine.units import Floats, Ints

# No single rule is best for all steps. Those of `rules_of` are tried in turn until a candidate is close to the bound.
# Percentages: how much longer steps become without the rule, mean and maximum of 480 steps (benchmarks/rules.py).
# Unsplit sequences fill the time that rings leave. 0.23 %, 8 %
_TIGHT = Rule(limit=1.0, join=0.0005, stretch=1.0, top=1.001)
# Few unsplit sequences: rings must leave little time. 0.05 %, 10 %
_FLUSH = Rule(limit=1.0, join=0.0005, stretch=2.0, top=1.002)
# Rings limited by transfers then need far fewer ranks. 0.06 %, 17 %
_LATER = Rule(limit=1.02, join=0.0005, stretch=2.0, top=1.02)
# A stretch between those of _TIGHT and _FLUSH. 0.04 %, 9 %
_BETWEEN = Rule(limit=1.0, join=0.0005, stretch=1.5, top=1.002)
# For runs of uneven heights and widths. 0.01 %, 2 %
_LOOSE = Rule(limit=1.0, join=0.002, stretch=3.0, top=1.005, gap=0.1)
# Shorter rings leave time for others above them. 0.01 %, 2 %
_SHORTER = Rule(limit=0.9, join=0.002, stretch=1.0, top=1.0)
# Few sequences or slow ranks: some rings must end late. 0.61 %, 20 %, and 0.42 %, 30 %
_LONG = Rule(limit=1.1, join=0.002, stretch=1.0, top=1.1)
_LONGER = Rule(limit=1.25, join=0.002, stretch=1.0, top=1.25)

_EVEN = (_TIGHT, _FLUSH)
_MORE = (_BETWEEN, _LOOSE, _SHORTER)
_FOR_FEW = (_LONG, _LONGER)
RULES = (*_EVEN, _LATER, *_MORE, *_FOR_FEW)

_FEW_PER_RANK = 4  # _FOR_FEW are tried with at most this many sequences per rank, or if some ranks are slow
_MUCH = 0.05  # if unsplit sequences are more than this fraction of the work, _TIGHT comes before _FLUSH
_FEWER = 0.8  # _LATER is tried if it reduces the degree of the longest sequence below this fraction
CLOSE = 1.005  # the first candidate within this factor of the bound is taken
# From LARGE sequences on, planning time matters more: fewer rules, swaps only for the best candidate, a wider factor.
LARGE = 4096
CLOSE_IF_LARGE = 1.01  # instead of CLOSE
_PASSES = 16  # most passes of swaps


@dataclass(frozen=True, eq=False)
class Candidate:
    """A placement: the first `placed` sequences are on rings, the other W are unsplit."""

    placed: int
    rings: Rings
    rings_height: Floats  # [P] time in ns at which each rank finishes its rings
    rank_of: Ints  # [W] rank of each unsplit sequence
    height: Floats  # [P] time in ns at which each rank finishes all its work

    @property
    def makespan(self) -> float:
        """Time until the last rank finishes, ns."""
        return float(self.height.max())


def best_candidate(workload: Workload) -> Candidate:
    """Build one candidate per rule until one is close to the bound; returns the one with the shortest makespan."""
    low, count, ranks = workload.bound, len(workload.lengths), workload.ranks
    large = count >= LARGE
    candidates: list[Candidate] = []
    for rule in rules_of(workload):
        rings = Rings(np.ones(count, dtype=np.int64), np.zeros(count, dtype=np.int64), np.zeros(count))
        rings_height = np.zeros(len(ranks.slow))
        placed = place_rings(
            workload.rates, workload.lengths, workload.gain, ranks, rule.in_ns(low), rings, rings_height
        )
        if any(np.array_equal(rings_height, other.rings_height) for other in candidates):
            continue  # most likely the same rings
        # A rank without rings pays for one micro-batch; elsewhere unsplit sequences may join the last ring.
        height = np.maximum(rings_height, workload.first * ranks.slow)
        rank_of = deal(workload.times[placed:], ranks.slow, height)
        candidates.append(Candidate(placed, rings, rings_height, rank_of, height))
        if not large:  # swaps often bring the first candidate close enough
            _even_out(workload, candidates[-1])
        if candidates[-1].makespan <= low * (CLOSE_IF_LARGE if large else CLOSE):
            break
    best = min(candidates, key=lambda candidate: candidate.makespan)
    if large:
        _even_out(workload, best)
    return best


def rules_of(workload: Workload) -> tuple[Rule, ...]:
    """Select the rules of ring placement to try for a step, in the order in which they are tried."""
    lengths, ranks = workload.lengths, workload.ranks
    split = int((lengths > ranks.holds.min()).sum())
    unsplit_work = float(np.cumsum(np.append(0.0, workload.times[split:]))[-1])
    rules: tuple[Rule, ...] = _EVEN if unsplit_work > _MUCH * workload.work else _EVEN[::-1]

    # The smallest degrees at which the longest sequence takes at most the bound, and at most 2 % more.
    tokens, most = float(lengths[0]), int((ranks.slow == ranks.slow.min()).sum())
    limits = workload.bound * 1.0001, workload.bound * _LATER.limit
    now, later = (
        least_degree(workload.rates, tokens, 1, most, ranks.node, ranks.overhead_per_token, limit) for limit in limits
    )
    if later < _FEWER * (now or most):
        rules = (*rules, _LATER)

    if len(lengths) >= LARGE:
        return rules
    few = len(lengths) <= _FEW_PER_RANK * len(ranks.slow)
    return rules + _MORE + _FOR_FEW if few or ranks.slow.max() > 1.0 else rules + _MORE


def _even_out(workload: Workload, one: Candidate) -> None:
    """Swap unsplit sequences between ranks to bring the makespan closer to the bound; changes `one`."""
    times = workload.times[one.placed :]
    even_out(times, workload.ranks.slow, one.height, one.rank_of, workload.bound, _PASSES)


def free_plan(workload: Workload, best: Candidate, settings: PlanSettings) -> StepPlan:
    """Build the plan of a candidate: rings in order of their start, then micro-batches of unsplit sequences."""
    rings, placed, lengths = best.rings, best.placed, workload.lengths
    group = np.empty(len(lengths), dtype=np.int64)
    group[np.argsort(rings.start[:placed], kind="stable")] = np.arange(placed)
    group[placed:] = placed + pack(lengths[placed:], best.rank_of, settings.capacities)
    ring = joined_ring(lengths, best, settings.capacities)
    group[placed:][ring >= 0] = group[ring[ring >= 0]]
    first = rings.first.copy()
    first[placed:] = best.rank_of
    return build_plan(workload, uncut(workload, group), rings.degree, first, settings)


def joined_ring(lengths: Ints, best: Candidate, holds: Ints) -> Ints:
    """For each unsplit sequence, the index of the ring whose micro-batch it joins, or -1, [W].

    Joining saves the fixed cost of a micro-batch. It requires that the ring is the last one of all its members, so that
    no member waits for another one's unsplit sequences, and that each member has enough capacity left for all its
    unsplit sequences. `lengths` [S] are in the workload's order; `holds` [P] is the capacity of each rank.
    """
    rings, placed = best.rings, best.placed
    degree, tokens = rings.degree[:placed], lengths[placed:]
    by_start = np.argsort(rings.start[:placed], kind="stable")
    degree_by_start = degree[by_start]
    members = np.repeat(rings.first[by_start] - np.cumsum(degree_by_start) + degree_by_start, degree_by_start)
    last = np.full(len(holds), -1, dtype=np.int64)  # [P] the last ring of each rank: later ones overwrite earlier ones
    last[members + np.arange(len(members))] = np.repeat(by_start, degree_by_start)
    packed = np.bincount(best.rank_of, weights=tokens, minlength=len(holds)).astype(np.int64)
    shard = np.append(-(-lengths[:placed] // degree), 0)  # the last entry is for ranks without a ring
    fits = (last >= 0) & (packed + shard[last] <= holds)
    all_fit = np.bincount(last[fits], minlength=placed) == degree
    return np.where(np.append(all_fit, False)[last], last, -1)[best.rank_of]
