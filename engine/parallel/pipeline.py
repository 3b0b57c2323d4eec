"""Pipeline parallelism on one device: its stage, and the transfers between neighbouring stages.

Activations go to the next stage after a forward pass, and gradients to the previous one after a backward pass. The send
after a pass and the receive before the next one are one batch if they have the same neighbour, else one after the
other, and the device waits for each. So a device never has two transfers at once, and one process group suffices: two
NCCL communicators of a device have no guarantee that both make progress. `verify` proves that no plan it accepts can
hang in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.planner.plan.order import Pass


class Transfer(NamedTuple):
    """A tensor to send to another stage, or to fill with what it sends."""

    way: Callable[..., Any]  # dist.isend or dist.irecv
    tensor: Tensor
    stage: int


class Pipeline:
    """The stage of a device, and its transfers over the group of the devices of all stages, in their order.

    `stream(tokens)` allocates a tensor of the shape, dtype and device of the residual stream between two stages, for a
    micro-batch of so many tokens. Every stage knows the size of each message from the plan.
    """

    def __init__(self, group: dist.ProcessGroup, stream: Callable[[int], Tensor]) -> None:
        self._group, self.stream = group, stream
        self.stage, self.stages = dist.get_rank(group), dist.get_world_size(group)

    @property
    def last(self) -> bool:
        """Whether this is the stage with the head."""
        return self.stage == self.stages - 1

    def exchange(self, done: Pass | None, result: Tensor | None, coming: Pass | None, tokens: int) -> Tensor | None:
        """Send the result of the pass that is done, receive what the next pass needs, and wait for both.

        `result` is the residual stream after a forward pass, or its gradient after a backward pass. `coming` is the
        next pass, of a micro-batch of `tokens` tokens. Before the first pass `done` is None, after the last one
        `coming`. Returns what was received; None if the next pass needs nothing from another stage.
        """
        send = receive = None
        if done is not None and 0 <= (target := self.stage + (1 if done.forward else -1)) < self.stages:
            assert result is not None
            send = Transfer(dist.isend, result.contiguous(), target)
        if coming is not None and 0 <= (source := self.stage - (1 if coming.forward else -1)) < self.stages:
            receive = Transfer(dist.irecv, self.stream(tokens), source)
        if send and receive and send.stage == receive.stage:
            self._batch(send, receive)
        else:
            for transfer in (send, receive):
                if transfer:
                    self._batch(transfer)
        return receive.tensor if receive else None

    def _batch(self, *transfers: Transfer) -> None:
        """Run transfers at once, and wait for them. Empty tensors are left out: both ends know that they are."""
        operations = [
            dist.P2POp(way, tensor, group=self._group, group_peer=stage)
            for way, tensor, stage in transfers
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()


def with_gradient(out: Tensor, gradient: Tensor) -> Tensor:
    """Return a zero that is connected to `out`: its backward pass begins at `out` with `gradient`, of the same shape.

    For engines that run backward passes from a scalar. The gradient of the scalar itself does not matter.
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
