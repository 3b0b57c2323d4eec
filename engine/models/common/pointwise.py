"""The pointwise operations of a layer, with explicit gradients.

Autograd would save the inputs of every small operation: for a norm in bf16 it saved 8 bytes per element, for SwiGLU one
tensor more than necessary. torch.compile may fuse each of the two functions of an operation into one kernel
(`engine/models/fuse.py`), but it cannot change which tensors are saved, so these stay the ones that
`engine.cost.activations.saved_bytes` counts.

Letters: T tokens, C hidden size, F width of the feed-forward layer, H heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.dtypes import wider
from engine.models.common.op import Op


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(wider(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype), scale


def _norm_backward(dout: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, None]:
    """With n = x * scale and g = dout * weight: dweight = sum_T(dout * n), dx = scale * (g - n * mean_C(g * n))."""
    normed, gradient = x * scale, dout * weight.to(scale.dtype)
    dweight = (dout * normed).flatten(0, -2).sum(0)
    mean = (gradient * normed).mean(-1, keepdim=True)
    # In place, because more tensors in the wider dtype would raise the peak memory of a layer's backward pass.
    dx = gradient.sub_(normed.mul_(mean)).mul_(scale)
    return dx.to(x.dtype), dweight.to(weight.dtype), None


def _swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor]:
    return (F.silu(gate) * up,)


def _swiglu_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(dout * up, gate), F.silu(gate).mul_(dout)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    """Rotate each pair of dimensions (i, i + D/2) by its angle. Hugging Face's weights use the same pairs.

    bf16 inputs are rotated in float32 and rounded once: with cos and sin in bf16 the error of q @ k was 1.5 to 2 times
    as large.
    """
    low, high = x.chunk(2, dim=-1)
    return ((x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype),)


def _rotate_backward(dout: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, None, None]:
    """The transpose of a rotation is the rotation by the opposite angle."""
    return _rotate(dout, cos, -sin)[0], None, None


# x [T,C] or [T,H,D], weight of the last dim, eps -> the shape of x; also saves one number per row
NORM = Op(_norm, _norm_backward, keeps=(0, 1))
SWIGLU = Op(_swiglu, _swiglu_backward, keeps=(0, 1))  # gate [T,F], up [T,F] -> silu(gate) * up, [T,F]
ROTATE = Op(_rotate, _rotate_backward, keeps=(1, 2))  # x [T,H,D], cos and sin [T,1,D] -> [T,H,D]
