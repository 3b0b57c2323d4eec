"""Ring traffic: one batched group of sends and receives a round, over one process group of all ranks.

A ring is only an ordered list of ranks, so no ring needs a communicator of its own (ByteScale, communicators).
Messages between two ranks match in the order in which they are posted: ring by ring, K,V before dK,dV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from engine.attention.buffers import Buffers


class Exchange(NamedTuple):
    """What one ring does in a round: send a buffer to the next rank and fill one from the previous. Empty ones rest."""

    send: Tensor
    next_rank: int
    receive: Tensor
    previous_rank: int


class Pending(Protocol):
    """A round's transfers under way."""

    def wait(self) -> None:
        """Return when all buffers are sent and filled."""


class Comm(Protocol):
    """How rings talk; tests put a transport of their own behind it."""

    buffers: Buffers

    def post(self, exchanges: Sequence[Exchange]) -> Pending:
        """Start the transfers of a round."""


class _Works:
    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class RingComm:
    """Ring traffic over a process group; ranks are its global ranks. `bytes_sent` counts what this rank has sent."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.buffers = Buffers()
        self.bytes_sent = 0

    def post(self, exchanges: Sequence[Exchange]) -> Pending:
        """Start the transfers of a round as one batch. Both sides know each size, so both skip what is empty."""
        operations = []
        for send, next_rank, receive, previous_rank in exchanges:
            if send.numel():
                operations.append(dist.P2POp(dist.isend, send, next_rank, self._group))
                self.bytes_sent += send.numel() * send.element_size()
            if receive.numel():
                operations.append(dist.P2POp(dist.irecv, receive, previous_rank, self._group))
        return _Works(dist.batch_isend_irecv(operations) if operations else [])
