"""Sums over the shards of a sequence: whole numbers that every member of its ring needs from all the others.

They take D - 1 rounds of the ring (schedule.py, direction "counts"): each member passes on what it last received and
adds it up. All members take part, one with an empty shard too.
Letters: S shards of this rank in the micro-batch, N numbers of a shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.comm import Comm, Exchange
from engine.attention.layout import Layout


def summed(counts: Tensor, layout: Layout, comm: Comm | None) -> Tensor:
    """Return counts [S,N] with those of each ring's other shards added. Whole numbers, so their order does not matter.

    `comm` may be None where the layout has no ring.
    """
    if layout.rings and comm is None:
        raise ValueError("a layout with rings needs a comm")
    rows = [row for row, shard in enumerate(layout.shards) if shard.ring]
    total, held = counts.clone(), [counts[row].clone() for row in rows]
    for round_ in range(layout.rounds("counts")):
        exchanges, arrived = [], {}
        for number, ring in enumerate(layout.rings):
            if ring.transfers(round_, "counts"):
                arrived[number] = torch.empty_like(held[number])
                exchanges.append(Exchange(held[number], ring.next_rank, arrived[number], ring.previous_rank))
        if exchanges and comm is not None:
            comm.post(exchanges).wait()
        for number, numbers in arrived.items():
            held[number] = numbers
            total[rows[number]] += numbers
    return total
