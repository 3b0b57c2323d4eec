"""Cuts the slots of a pipeline, and the long sequences in them, into shorter slots, so that stages wait less.

All stages of a pipeline wait for its longest micro-batch, stages - 1 times. So a slot in which a ring takes long is cut
into k slots. The ring's sequence is cut into k slices of equal time, one in each; shorter sequences are divided among
the k slots, the longest first, each to the slot that ends the earliest:

```
 before   |[ ring of 3, 12 s                     ]        after   |[ slice 0 ][ slice 1 ][ slice 2 ][ slice 3 ]
          |[ 5 s       ][ 4 s     ][ 3 s   ]              |[ 5 s, cut in 2    ][ 4 s    ][ 3 s    ]
```
A slice attends to all earlier slices, so the last one has the fewest tokens. Their K,V travel around the ring again for
every slice: with k slices the ring carries (k + 1) / 2 times the bytes.

Letters: S sequences, P ranks, N slices.
"""

from __future__ import annotations

import numpy as np

from engine.compiled import njit
from engine.cost.times import Rates, in_team
from engine.planner.adaptive.build import Cut
from engine.planner.adaptive.slots import Slots
from engine.planner.adaptive.workload import Workload
from engine.planner.plan.rows import grouped
from engine.planner.settings import PlanSettings
from engine.planner.time.bound import ring_time
from engine.units import Floats, Ints

_LEAST = 64  # tokens of a slice on each rank, on average: with fewer, rounds cost more than they compute
_CLOSE = 0.1  # a sequence is cut only if it is longer than a slot by more than this fraction of the slot


def cut_slots(workload: Workload, filled: Slots, settings: PlanSettings, targets: Floats) -> Cut:
    """Cut each slot into slots of about targets[slot] ns. The arrays of the result are in the workload's order.

    A rank has at most as many tokens in each of the new slots as in the slot that was cut, so these fit too.
    """
    rates, lengths, node = workload.rates, workload.lengths, workload.ranks.node
    number, degree, first = filled
    parts, slots = _parts(rates, lengths, degree, first, number, settings.ranks, node, targets)
    sequence = np.repeat(np.arange(len(lengths)), parts)
    index = np.arange(len(sequence)) - (np.cumsum(parts) - parts)[sequence]
    before = _tokens_of_work(rates, lengths[sequence], index, parts[sequence])
    ends = _tokens_of_work(rates, lengths[sequence], index + 1, parts[sequence])
    number = np.unique(slots[sequence] + index, return_inverse=True)[1]
    team = _teams(rates, ends - before, before, degree[sequence], node)
    return Cut(sequence, ends - before, number, before, np.maximum.reduceat(team, np.cumsum(parts) - parts)[sequence])


@njit
def _teams(rates: Rates, lengths: Ints, before: Ints, degree: Ints, node: int) -> Ints:
    """Return the size of the teams in which each slice takes the shortest time, [N]."""
    found = np.ones(len(lengths), np.int64)
    for at in range(len(lengths)):
        if degree[at] > 1:
            slowdown = rates.inter_node_slowdown if degree[at] > node else 1.0
            found[at] = in_team(rates, float(lengths[at]), float(before[at]), degree[at], slowdown)[1]
    return found


def _tokens_of_work(rates: Rates, lengths: Ints, index: Ints, parts: Ints) -> Ints:
    """Return how many tokens of each sequence take index / parts of its time, [N]; at least `index` tokens.

    The time of the first n tokens is a n^2 + b n, for attention and linear layers, less a (n - w)^2 in the fraction of
    layers whose attention has a window of w < n tokens.
    """
    a = ((1.0 + rates.recompute_factor) * rates.pair_f + rates.pair_b) / 2.0
    b, windowed, window = rates.token_f + rates.token_b, a * rates.windowed, rates.window

    def solved(a: float, b: float, work: Floats) -> Floats:
        """The n at which a n^2 + b n is the work."""
        found = (np.sqrt(b * b + 4.0 * a * work) - b) / max(2.0 * a, 1e-300)
        return np.where(a > 0.0, found, work / max(b, 1e-300))

    beyond = np.maximum(0.0, lengths - window)
    work = (a * lengths * lengths + b * lengths - windowed * beyond * beyond) * index / parts
    tokens = solved(a, b, work)
    longer = solved(a - windowed, b + 2.0 * windowed * window, work + windowed * window * window)
    tokens = np.where(tokens > window, longer, tokens)
    tokens = np.where(index == parts, lengths, np.floor(tokens).astype(np.int64))
    return np.maximum(index, np.minimum(tokens, lengths - (parts - index)))


@njit
def _parts(
    rates: Rates,
    lengths: Ints,
    degree: Ints,
    first: Ints,
    number: Ints,
    ranks: int,
    node: int,
    targets: Floats,
) -> tuple[Ints, Ints]:
    """Return the number of slices of each sequence, and the slot of its first one, [S] each.

    Sequence s of lengths [S] runs in slot number[s] on the ranks first[s] .. first[s] + degree[s] - 1. Slots are
    numbered in their order, with gaps.
    """
    count = len(lengths)
    parts, slots, times = np.ones(count, np.int64), np.zeros(count, np.int64), np.empty(count)
    for at in range(count):
        times[at] = ring_time(rates, float(lengths[at]), degree[at], node, 0.0)
    start, members = grouped(number, int(number.max()) + 1)
    base = 0
    for slot in range(len(start) - 1):
        own = members[start[slot] : start[slot + 1]]
        busy = np.zeros(ranks)
        for at in own:
            busy[first[at] : first[at] + degree[at]] += times[at]
        # As many pieces as bring the busiest rank of the slot close to the target.
        pieces = max(1, int(np.rint(busy.max() / targets[slot])))
        long = busy.max() / pieces
        height = np.zeros((pieces, ranks))
        for at in own[np.argsort(-times[own], kind="mergesort")]:
            a, b = first[at], first[at] + degree[at]
            # No more slices than leave `_LEAST` tokens on each rank, and none for a sequence that hardly exceeds a
            # piece.
            most = max(1, lengths[at] // (degree[at] * _LEAST))
            cut = min(pieces, most, max(1, int(np.ceil(times[at] / long - _CLOSE))))
            # Consecutive pieces, because a slice attends to the slice before it. Of all such places the one where the
            # sequence ends the earliest; the longest sequences choose first.
            best, chosen = np.inf, 0
            for begin in range(pieces - cut + 1):
                end = 0.0
                for piece in range(begin, begin + cut):
                    end = max(end, height[piece, a:b].max())
                if end < best:
                    best, chosen = end, begin
            height[chosen : chosen + cut, a:b] += times[at] / cut
            parts[at], slots[at] = cut, base + chosen
        base += pieces
    return parts, slots
