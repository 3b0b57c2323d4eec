"""Sums integers over the shards of each sequence, so that every rank of a ring gets the sum.

A sum takes D - 1 rounds on a ring of degree D (schedule.py, direction "counts"): in each round a rank sends the counts
that it received in the previous round, and adds those that it receives. Ranks with an empty shard take part too.

Letters: S shards of this rank in the micro-batch, N integers per shard.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.comm import Comm, Exchange
from engine.attention.layout import Layout


def sum_over_rings(counts: Tensor, layout: Layout, comm: Comm | None) -> Tensor:
    """Sum counts over all shards of each sequence: [S,N] to [S,N]; row s is the sum over the sequence of shard s.

    Collective: all ranks of a ring must call it. `comm` may be None for a layout without rings.
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
                there, back = ring.rank("counts", 1), ring.rank("counts", -1)
                exchanges.append(Exchange(held[number], there, arrived[number], back))
        if exchanges and comm is not None:
            comm.post(exchanges).wait()
        for number, numbers in arrived.items():
            held[number] = numbers
            total[rows[number]] += numbers
    return total
