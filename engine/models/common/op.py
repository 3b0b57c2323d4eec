"""An operation with an explicit gradient, so that this code decides which tensors are saved for the backward pass.

Both functions run outside autograd, so they can be compiled or wrapped (`Op.around`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Op:
    """A differentiable function with an explicit gradient: `op(*inputs)` computes its output.

    `forward(*inputs)` returns the output, followed by additional tensors to save. `backward(dout, *saved)` returns the
    gradient of each input (None for inputs that need none). `saved` are the inputs at the indices `keeps`, followed by
    the additional tensors.

    Inputs at the indices `referenced`, of those in `keeps`, reach `backward` as they are. Hooks on saved tensors, of
    recompute and offload, replace all others by tensors that are not the parameters themselves.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    keeps: tuple[int, ...]  # indices of the inputs to save
    # PyTorch's own function with the same output, gradients and saved tensors: it takes less time on the host. If it is
    # set, it runs instead of the two functions, so it belongs to these two only: `around` leaves it out.
    native: Callable[..., Tensor] | None = None
    referenced: tuple[int, ...] = ()

    def __call__(self, *inputs: Any) -> Tensor:
        """Compute the output, and record the gradient for autograd."""
        if self.native is not None:
            return self.native(*inputs)
        return _Run.apply(self, *inputs)  # type: ignore[no-any-return]

    def around(
        self, forward: Callable[..., tuple[Tensor, ...]], backward: Callable[..., tuple[Tensor | None, ...]]
    ) -> Op:
        """Return a copy with functions that call those of this operation. It keeps the same inputs."""
        return replace(self, forward=forward, backward=backward, native=None)


class _Run(torch.autograd.Function):
    """Runs an `Op` under autograd: saves the tensors that it names, and computes gradients with its `backward`."""

    @staticmethod
    def forward(ctx: Any, op: Op, *inputs: Any) -> Tensor:
        out, *kept = op.forward(*inputs)
        ctx.op, ctx.held = op, {number: inputs[number] for number in op.referenced}
        ctx.save_for_backward(*(inputs[number] for number in op.keeps if number not in ctx.held), *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [ctx.held[number] if number in ctx.held else next(saved) for number in ctx.op.keeps]
        return None, *ctx.op.backward(*gradient, *inputs, *saved)
