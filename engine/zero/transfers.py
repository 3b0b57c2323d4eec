"""Reduces gradients into shards, and gathers weights from shards, over the ranks that share a flat tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.parallel.collectives import all_gather_single, reduce_scatter_single

_PIECE = 1 << 16  # elements of a part that ranks on CPUs exchange at once


def shard_of(flat: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the part of a flat tensor that a rank stores, a view."""
    return flat.view(ranks, -1)[rank]


def reduce_scatter(flat: Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Sum `flat` over a group of ranks, and write a rank's part of the sum over this rank's part of `flat`.

    Returns the work to wait for; None if it is done. The other parts of `flat` are undefined afterwards.
    """
    if ranks == 1:
        return None
    own = shard_of(flat, rank, ranks)
    if flat.device.type == "cuda":
        # In place, as NCCL allows: the output is the input's part at rank x count.
        work: dist.Work = reduce_scatter_single(own, flat, group=group, async_op=True)
        return work
    # Gloo's reduce-scatter is an all-reduce of a copy. Exchanging the parts sends half as much, and the sum has the
    # order of the ranks, whatever the buckets.
    parts = flat.view(ranks, -1)
    received = torch.empty(ranks, min(_PIECE, len(own)), dtype=flat.dtype)
    for start in range(0, len(own), _PIECE):
        stop = min(start + _PIECE, len(own))
        others = list(received[:, : stop - start])
        dist.all_to_all(others, list(parts[:, start:stop]), group=group)
        own[start:stop].copy_(others[0])
        for other in others[1:]:
            own[start:stop].add_(other)
    return None


def gather(flat: Tensor, rank: int, ranks: int, group: dist.ProcessGroup | None) -> Any:
    """Begin to fill `flat` with the parts of all ranks of a group. Returns the work to wait for; None if it is done."""
    if ranks == 1:
        return None
    # In place, as NCCL allows: the input is the output's part at rank x count.
    return all_gather_single(flat, shard_of(flat, rank, ranks), group=group, async_op=True)
