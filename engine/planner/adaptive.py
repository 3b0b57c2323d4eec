"""Our planner: each sequence on the ring that shortens the step, at true cost.

1. `bound`: the least time T in which the step can be done, and so how long a ring may take.
2. Candidates: no ring may take longer than a share of T; for each share rings go on a skyline without gaps
   (skyline.py), then whole sequences fill it up (shorts.py). With offload, rings may be shorter than capacity asks.
3. Choice: the candidate with the least makespan.
4. Emission: rings in the order of their start, then each rank's whole sequences in packed micro-batches.

A pure function of lengths and settings: no clock, no random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.cost.times import wholes
from engine.planner import memory
from engine.planner.bound import Floats, bound
from engine.planner.emit import build
from engine.planner.plan import Ints, StepPlan
from engine.planner.settings import PlanSettings
from engine.planner.shorts import deal, even_out, pack
from engine.planner.skyline import Ranks, Rings, Rule, place_rings

_INF = float("inf")
_RULES = (  # in shares of the bound: limit, join; stretch; tries; gap, top
    (1.0, 0.0005, 1.0, 8, 0.05, 1.001),
    (1.0, 0.002, 1.25, 8, 0.05, 1.005),
    (1.0, 0.002, 1.25, 8, 0.0, 1.01),
    (1.0, 0.002, 1.5, 8, 0.05, 1.01),
    (1.0, 0.0, 1.5, 1, 0.0, _INF),
    (0.75, 0.002, 1.25, 8, 0.05, 1.0),
    (0.5, 0.002, 1.0, 8, 0.05, 1.0),
)
_PASSES = 16  # of swaps
_WORTH = 0.999  # offload is taken only where it shortens the step
_CLOSE = 1.0025  # a candidate this near the bound is taken at once


@dataclass(frozen=True, eq=False)
class Problem:
    """A step as the kernels read it; sequences in descending order. ns, tokens, P ranks."""

    lengths: Ints  # [S]
    times: Floats  # [S] of uncut sequences, with their share of a micro-batch's fixed cost
    gain: Floats  # [S]
    ranks: Ranks
    bound: float


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


def adaptive(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan a step."""
    order = np.argsort(-lengths, kind="stable")
    descending = np.ascontiguousarray(lengths[order])
    best = _best(problem_of(descending, replace(settings, offload=0)), settings)
    if settings.offload and settings.costs.layers > 2:
        other = _best(problem_of(descending, settings), settings)
        if other.makespan < _WORTH * best.makespan:
            best = other
    return _emit(order, descending, best, settings)


def problem_of(lengths: Ints, settings: PlanSettings) -> Problem:
    """Return the step of `lengths` [S], in descending order."""
    rates, cluster, holds = settings.costs.rates, settings.cluster, settings.capacities
    gain, most = np.ones(len(lengths)), holds
    if settings.offload:
        gain, most = memory.gain(lengths, settings), memory.most_tokens(settings)
    ranks = Ranks(holds, most, 100.0 / cluster.speed, max(node.slots for node in cluster.nodes), share_of(settings))
    floors = -(-lengths // np.maximum(holds.max(), np.minimum(most.max(), (holds.max() * gain).astype(np.int64))))
    low = bound(rates, lengths, floors, ranks.share, ranks.node, settings.ranks, int(cluster.speed.sum()) / 100)
    return Problem(lengths, wholes(rates, lengths) + ranks.share * lengths, gain, ranks, low)


def share_of(settings: PlanSettings) -> float:
    """Return what a token pays of a micro-batch's fixed cost, ns: a full one holds C of them."""
    return settings.costs.rates.micro / settings.capacity


def lower_bound(lengths: Ints, settings: PlanSettings) -> float:
    """Return the lower bound of a step of `lengths` [S], ns."""
    return problem_of(np.sort(lengths)[::-1].copy(), settings).bound


def _best(problem: Problem, settings: PlanSettings) -> Candidate:
    low = problem.bound
    candidates: list[Candidate] = []
    for limit, join, stretch, tries, gap, top in _RULES:
        rule = Rule(limit * low, join * low, stretch, tries, gap * low, top * low)
        placed, rings, height = _place(problem, settings, rule)
        if any(np.array_equal(height, other.rings_height) for other in candidates):
            continue
        candidates.append(_fill(problem, placed, rings, height))
        if candidates[-1].makespan <= _CLOSE * low:
            break
    best = min(candidates, key=lambda candidate: candidate.makespan)
    even_out(problem.times[best.placed :], problem.ranks.slow, best.height, best.rank_of, low, _PASSES)
    return best


def _place(problem: Problem, settings: PlanSettings, rule: Rule) -> tuple[int, Rings, Floats]:
    count = len(problem.lengths)
    rings = Rings(np.ones(count, dtype=np.int64), np.zeros(count, dtype=np.int64), np.zeros(count))
    height = np.zeros(settings.ranks)
    placed = place_rings(settings.costs.rates, problem.lengths, problem.gain, problem.ranks, rule, rings, height)
    return placed, rings, height


def _fill(problem: Problem, placed: int, rings: Rings, height: Floats) -> Candidate:
    full = height.copy()
    rank_of = deal(problem.times[placed:], problem.ranks.slow, full)
    return Candidate(placed, rings, height, rank_of, full)


def _emit(order: Ints, lengths: Ints, best: Candidate, settings: PlanSettings) -> StepPlan:
    """Return the plan: rings along their start, then micro-batches of whole sequences, by their number in the rank."""
    rings, placed = best.rings, best.placed
    group = np.empty(len(lengths), dtype=np.int64)
    group[np.argsort(rings.start[:placed], kind="stable")] = np.arange(placed)
    group[placed:] = placed + pack(lengths[placed:], best.rank_of, settings.capacities)
    first = rings.first.copy()
    first[placed:] = best.rank_of
    back = np.argsort(order)
    degree = rings.degree[back]
    ring_start = np.concatenate([[0], np.cumsum(degree)])
    ring_ranks = fold(first[back], degree, ring_start)
    offload = memory.offload(lengths, rings.degree, settings)[back]
    return build(
        "adaptive", settings.mode, settings.ranks, settings.capacity, np.ascontiguousarray(lengths[back]), group[back],
        ring_start, ring_ranks, offload,
    )


def fold(first: Ints, degree: Ints, ring_start: Ints) -> Ints:
    """Return all rings' ranks, [K]: `rings.folded` over arrays."""
    ring = np.repeat(np.arange(len(degree)), degree)
    part = np.arange(ring_start[-1]) - ring_start[:-1][ring]
    half = (degree[ring] + 1) // 2
    return first[ring] + np.where(part < half, 2 * part, 2 * (degree[ring] - part) - 1)
