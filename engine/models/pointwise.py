"""The pointwise parts of a layer, each with a gradient of its own, so that it says itself what it keeps.

Autograd keeps every link of a chain of small operations: of a norm in bf16 it kept 8 bytes an element, of SwiGLU one
tensor more than is needed. Here a part is two plain functions, forward and backward. A compiler may make one kernel of
each (`engine/models/fuse.py`): it sees no graph between them, so it does not decide what is kept, which is what
`engine.cost.activations.saved_bytes` counts, and nothing that waits for other ranks is inside.

Letters: T tokens, C hidden size, F width of the feed-forward layer, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.dtypes import wider


@dataclass(frozen=True)
class Op:
    """A function of tensors: `op(*inputs)` is its output, and knows its gradient.

    `forward` returns the output and what else the backward pass needs; `backward` takes the output's gradient, the
    inputs that are kept and that, and returns the gradient of each input.
    """

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor | None, ...]]
    keeps: tuple[int, ...]  # which inputs

    def __call__(self, *inputs: Any) -> Tensor:
        """Return the output."""
        return _Run.apply(self, *inputs)  # type: ignore[no-any-return]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Op, *inputs: Any) -> Tensor:
        out, *kept = op.forward(*inputs)
        ctx.op = op
        ctx.save_for_backward(*(inputs[number] for number in op.keeps), *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.op.backward(*gradient, *ctx.saved_tensors)


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(wider(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), scale


def _norm_backward(dout: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, None]:
    """With n = x scale, of rows of C: dweight = sum over T of dout n; dx = scale (g - n mean(g n)), g = dout weight."""
    normed, gradient = x * scale, dout * weight.to(scale.dtype)
    dweight = (dout * normed).sum(0)
    mean = (gradient * normed).mean(-1, keepdim=True)
    dx = gradient.sub_(normed.mul_(mean)).mul_(scale)  # in place: else rows in the wider dtype would set the peak
    return dx.to(x.dtype), dweight.to(weight.dtype), None


def _swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor]:
    return (F.silu(gate) * up,)


def _swiglu_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(dout * up, gate), F.silu(gate).mul_(dout)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    """Rotate each pair (i, i + D/2) by its angle, as Hugging Face's weights expect.

    bf16 is rotated in float32 and rounded once: with cos and sin in bf16 the error of q.k was 1.5 to 2 times as large.
    """
    low, high = x.chunk(2, dim=-1)
    return ((x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype),)


def _rotate_backward(dout: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, None, None]:
    """A rotation's gradient is turned back by the same angle."""
    return _rotate(dout, cos, -sin)[0], None, None


NORM = Op(_norm, _norm_backward, keeps=(0, 1))  # x [T,C], weight [C], eps -> [T,C]; keeps one number a row
SWIGLU = Op(_swiglu, _swiglu_backward, keeps=(0, 1))  # gate [T,F], up [T,F] -> silu(gate) up, [T,F]
ROTATE = Op(_rotate, _rotate_backward, keeps=(1, 2))  # x [T,H,D], cos and sin [T,1,D] -> [T,H,D]
