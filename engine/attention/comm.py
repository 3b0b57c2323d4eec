"""Communication of rings: one batch of sends and receives per hop, over one process group of all HDP ranks.

A ring is only an ordered list of ranks, so rings share this group and create no communicators (ByteScale,
communicators). Messages between two ranks are matched in posting order: ring by ring, K,V before dK,dV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.buffers import Buffers


class Exchange(NamedTuple):
    """One message in each direction of a ring: `send` goes to HDP rank `next_rank`, `receive` is filled by
    `previous_rank`. Empty tensors are not transferred."""

    send: Tensor
    next_rank: int
    receive: Tensor
    previous_rank: int


class Pending(Protocol):
    """Transfers that have been started and may still be in progress."""

    def wait(self) -> None:
        """Wait until every send and receive is complete."""


class Comm(Protocol):
    """The communication interface of rings. `RingComm` implements it; tests use other implementations."""

    buffers: Buffers

    def post(self, exchanges: Sequence[Exchange]) -> Pending:
        """Start all transfers of a hop, and return them for `wait`."""


class _Works:
    """The `Pending` of `RingComm`."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class RingComm:
    """Ring communication over a process group of all HDP ranks. Peers are HDP ranks, as in plans.

    `bytes_sent` is the total number of bytes that this rank has sent.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.buffers = Buffers()
        self.bytes_sent = 0

    def post(self, exchanges: Sequence[Exchange]) -> Pending:
        """Start all transfers of a hop as one batch, and return them for `wait`.

        Empty messages are skipped. Sender and receiver know the size of each message, so both skip the same ones.
        """
        operations = []
        for send, next_rank, receive, previous_rank in exchanges:
            if send.numel():
                operations.append(dist.P2POp(dist.isend, send, group=self._group, group_peer=next_rank))
                self.bytes_sent += send.numel() * send.element_size()
            if receive.numel():
                operations.append(dist.P2POp(dist.irecv, receive, group=self._group, group_peer=previous_rank))
        return _Works(dist.batch_isend_irecv(operations) if operations else [])

    def meet(self, peers: Sequence[int], device: torch.device) -> None:
        """Exchange one element with each of `peers`, and wait. Each of them must list this rank among its own peers.

        With NCCL the first message between two ranks builds their connection and allocates its buffers, for which the
        host waits; without this call that would happen in the middle of the first steps. One batch holds all messages,
        so no order of ranks can deadlock. gloo has connected all ranks already: there it costs one small round.
        """
        operations = []
        for peer in peers:
            one, other = (torch.zeros(1, device=device) for _ in range(2))
            operations.append(dist.P2POp(dist.isend, one, group=self._group, group_peer=peer))
            operations.append(dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer))
        _Works(dist.batch_isend_irecv(operations) if operations else []).wait()
