"""Candidates for free mode: first rings on a skyline (skyline.py), then unsplit sequences on top (unsplit.py).

Letters: S sequences in descending order, P ranks, W unsplit sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from engine.compiled import njit
from engine.cost.times import Rates
from engine.planner.adaptive.build import build_plan, uncut
from engine.planner.adaptive.skyline import Rings, Rule, place_rings
from engine.planner.adaptive.unsplit import deal, even_out, pack
from engine.planner.adaptive.workload import Ranks, Workload
from engine.planner.plan.rows import ascending
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
_LATER_LIMIT = 1.02
_LATER = Rule(limit=_LATER_LIMIT, join=0.0005, stretch=2.0, top=1.02)
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

    @cached_property
    def by_start(self) -> Ints:
        """The rings in order of their start, [placed]."""
        return ascending(self.rings.start[: self.placed].view(np.int64))  # bits of times: they are not negative

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
    few_unsplit, later = _preferences(workload.rates, lengths, workload.times, workload.bound, ranks)
    rules: tuple[Rule, ...] = _EVEN[::-1] if few_unsplit else _EVEN
    if later:
        rules = (*rules, _LATER)

    if len(lengths) >= LARGE:
        return rules
    few = len(lengths) <= _FEW_PER_RANK * len(ranks.slow)
    return rules + _MORE + _FOR_FEW if few or ranks.slow.max() > 1.0 else rules + _MORE


@njit
def _preferences(rates: Rates, lengths: Ints, times: Floats, bound: float, ranks: Ranks) -> tuple[bool, bool]:
    """Return whether few sequences are unsplit, and whether _LATER is tried."""
    least, slow, most = ranks.holds.min(), ranks.slow.min(), 0
    for rank in range(len(ranks.slow)):
        most += int(ranks.slow[rank] == slow)
    work = unsplit = 0.0
    for at in range(len(lengths)):
        work += times[at]
        if lengths[at] <= least:
            unsplit += times[at]
    # The smallest degrees at which the longest sequence takes at most the bound, and at most 2 % more.
    tokens, node, overhead = float(lengths[0]), ranks.node, ranks.overhead_per_token
    now = least_degree(rates, tokens, 1, most, node, overhead, bound * 1.0001)
    later = least_degree(rates, tokens, 1, most, node, overhead, bound * _LATER_LIMIT)
    return unsplit <= _MUCH * work, later < _FEWER * (now if now else most)


def _even_out(workload: Workload, one: Candidate) -> None:
    """Swap unsplit sequences between ranks to bring the makespan closer to the bound; changes `one`."""
    times = workload.times[one.placed :]
    even_out(times, workload.ranks.slow, one.height, one.rank_of, workload.bound, _PASSES)


def free_plan(workload: Workload, best: Candidate, settings: PlanSettings) -> StepPlan:
    """Build the plan of a candidate: rings in order of their start, then micro-batches of unsplit sequences."""
    rings, placed, lengths = best.rings, best.placed, workload.lengths
    packed = pack(lengths[placed:], best.rank_of, settings.capacities)
    group = _groups(best.by_start, packed, joined_ring(lengths, best, settings.capacities))
    first = rings.first.copy()
    first[placed:] = best.rank_of
    return build_plan(workload, uncut(workload, group), rings.degree, first, settings)


@njit
def _groups(by_start: Ints, packed: Ints, joined: Ints) -> Ints:
    """Number the groups: rings in order of their start, then micro-batch packed [W] of each rank; returns those of all
    sequences, [S]. Those that join a ring, joined [W], if it is not -1, are in its group."""
    placed = len(by_start)
    group = np.empty(placed + len(packed), np.int64)
    for number in range(placed):
        group[by_start[number]] = number
    for at in range(len(packed)):
        group[placed + at] = group[joined[at]] if joined[at] >= 0 else placed + packed[at]
    return group


def joined_ring(lengths: Ints, best: Candidate, holds: Ints) -> Ints:
    """For each unsplit sequence, the index of the ring whose micro-batch it joins, or -1, [W].

    Joining saves the fixed cost of a micro-batch. It requires that the ring is the last one of all its members, so that
    no member waits for another one's unsplit sequences, and that each member has enough capacity left for all its
    unsplit sequences. `lengths` [S] are in the workload's order; `holds` [P] is the capacity of each rank.
    """
    rings = best.rings
    return _joined_ring(lengths, rings.degree, rings.first, best.by_start, best.rank_of, holds)


@njit
def _joined_ring(lengths: Ints, degree: Ints, first: Ints, by_start: Ints, rank_of: Ints, holds: Ints) -> Ints:
    """Compiled part of `joined_ring`. `by_start` lists the rings in order of their start."""
    ranks, placed = len(holds), len(by_start)
    last = np.full(ranks, -1)  # by rank: its last ring
    for ring in by_start:
        last[first[ring] : first[ring] + degree[ring]] = ring
    tokens = np.zeros(ranks, np.int64)  # of unsplit sequences
    for at in range(len(rank_of)):
        tokens[rank_of[at]] += lengths[placed + at]
    fit = np.zeros(placed, np.int64)  # by ring: members of which it is the last ring, with enough capacity left
    # The capacity must hold a rank's part of the ring, rounded up, and all its unsplit sequences.
    for rank in range(ranks):
        ring = last[rank]
        if ring >= 0 and tokens[rank] - (-lengths[ring] // degree[ring]) <= holds[rank]:
            fit[ring] += 1
    joined = np.full(len(rank_of), -1)
    for at in range(len(rank_of)):
        ring = last[rank_of[at]]
        if ring >= 0 and fit[ring] == degree[ring]:
            joined[at] = ring
    return joined
