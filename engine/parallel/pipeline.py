"""Pipeline parallelism on one device: its stage, and the transfers between neighbouring stages.

Activations go to the next stage after a forward pass, and gradients to the previous one after a backward pass. Both
devices start their transfers in the order of `engine.planner.plan.order.actions`, and compute while a transfer is under
way; only the pass that needs what arrives waits for it. On GPUs all transfers of a device are on one stream of one
process group, so it never has two at once, and starts each after the passes that it has launched before: this is the
graph that `verify` proves to have no cycle. Two NCCL communicators for the two directions would have no guarantee that
both make progress. If NCCL runs the transfers and the messages of rings one after the other, in the order in which they
are launched, each still waits only for the passes before it in the plan's list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.planner.plan.order import Pass


class Pipeline:
    """The stage of a device, and its transfers over the group of the devices of all stages, in their order.

    `stream(tokens)` allocates a tensor of the shape, dtype and device of the residual stream between two stages, for a
    micro-batch of so many tokens. Every stage knows the size of each message from the plan.
    """

    def __init__(self, group: dist.ProcessGroup, stream: Callable[[int], Tensor]) -> None:
        self._group, self.stream = group, stream
        self.stage, self.stages = dist.get_rank(group), dist.get_world_size(group)
        self._number = 0
        self._arriving: dict[Pass, _Started] = {}
        self._leaving: list[_Started] = []  # in the order in which they were started

    @property
    def last(self) -> bool:
        """Whether this is the stage with the head."""
        return self.stage == self.stages - 1

    def send(self, done: Pass, result: Tensor) -> None:
        """Start to send the result of a pass: the residual stream after a forward pass, its gradient after a backward
        pass."""
        target = self.stage + (1 if done.forward else -1)
        self._leaving.append(self._start(dist.isend, result.contiguous(), target))

    def receive(self, done: Pass, tokens: int) -> None:
        """Start to receive the result of a neighbour's pass of a micro-batch of `tokens` tokens."""
        source = self.stage - (1 if done.forward else -1)
        self._arriving[done] = self._start(dist.irecv, self.stream(tokens), source)

    def input_of(self, coming: Pass) -> Tensor | None:
        """Wait for the input of a pass from another stage, and return it; None if the pass needs no such input."""
        if coming not in self._arriving:
            return None
        arrived = self._arriving.pop(coming)
        arrived.wait()
        # The neighbour has started all earlier transfers between the two, so tensors that were sent to it can be freed
        # now.
        sent = [one for one in self._leaving if one.stage == arrived.stage and one.number < arrived.number]
        for one in sent:
            one.wait()
        self._leaving = [one for one in self._leaving if one not in sent]
        return arrived.tensor

    def finish(self, under_way: int = 0) -> None:
        """Wait until all results have been sent, except the last `under_way`, and free them.

        Before the end of a step only if there are no backward passes: stages that send to each other would wait for
        each other.
        """
        sent = len(self._leaving) - under_way
        for one in self._leaving[: max(0, sent)]:
            one.wait()
        del self._leaving[: max(0, sent)]

    def _start(self, way: Callable[..., Any], tensor: Tensor, stage: int) -> _Started:
        """Start a transfer. Empty tensors are not transferred: both ends know that they are empty."""
        self._number += 1
        # As a batch, because NCCL would build a communicator for each pair of ranks otherwise.
        batch = [dist.P2POp(way, tensor, group=self._group, group_peer=stage)] if tensor.numel() else []
        return _Started(tensor, dist.batch_isend_irecv(batch) if batch else [], stage, self._number)


@dataclass(frozen=True, eq=False)
class _Started:
    """A transfer that has been started: the tensor to send or to receive into, and the other stage."""

    tensor: Tensor
    works: list[dist.Work]
    stage: int
    number: int  # transfers of this device that were started before it

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def with_gradient(out: Tensor, gradient: Tensor) -> Tensor:
    """Return a zero that is connected to `out`: its backward pass begins at `out` with `gradient`, of the same shape.

    For engines that run backward passes from a scalar. The gradient of the scalar itself is ignored.
    """
    return _WithGradient.apply(out, gradient)  # type: ignore[no-any-return]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return out.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient, None
