"""Small collectives on plain values over the control group.

Each transfers a constant number of bytes per rank at any world size, except `gather`, which is for checkpoints and
errors only.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
import torch.distributed as dist

from engine.errors import PlanError


class Control:
    """Collectives over a gloo group of all ranks. All ranks must call the same methods in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def total(self, value: float) -> float:
        """Sum a value over all ranks, in float64."""
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, group=self._group)
        return tensor.item()

    def largest(self, *values: float) -> list[float]:
        """Return the maximum over all ranks of each value, in float64."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return tensor.tolist()

    def check_same(self, digest: str) -> None:
        """Check that all ranks pass the same plan digest, 128 bits in hexadecimal. Otherwise all raise PlanError."""
        halves = struct.unpack("<2q", bytes.fromhex(digest))
        # One reduction gives maximum and minimum: max(~x) is ~min(x), and unlike -x, ~x cannot overflow.
        ends = torch.tensor([*halves, *(~half for half in halves)])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._group)
        if ends[:2].tolist() != (~ends[2:]).tolist():
            digests = self.gather(digest)
            odd = next(rank for rank, other in enumerate(digests) if other != digests[0])
            raise PlanError(
                0, f"rank {odd}'s plan differs from rank 0's (digest {digests[odd]}, expected {digests[0]})"
            )

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank.

        Do not call it in every step: the number of bytes grows with the number of ranks.
        """
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values
