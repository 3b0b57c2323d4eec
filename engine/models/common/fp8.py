"""Products of linear layers in FP8, with one scale for each tensor and micro-batch.

FP8 has few exponents, so a tensor x is divided by a scale before it is rounded, and products are multiplied by the
scales of both factors:

    s = max|x| / largest FP8 number        x8 = fp8(x / s)        a b^T ~ s_a s_b (a8 b8^T), summed in fp32

| product | left | right | sum in the tensor cores |
|---|---|---|---|
| y = x w^T | x, e4m3 | w, e4m3 | fast |
| dx = dout w | dout, e5m2 | w, e4m3 | exact |
| dw = dout^T x | dout, e5m2 | x, e4m3 | exact |

These are the choices of torchao's recipe `tensorwise` (torchao/float8/config.py, `Float8LinearConfig`), and the formats
are those of Micikevicius et al. 2022, "FP8 formats for deep learning", section 3: gradients need range, not digits.
As there, what is saved for the backward pass is x itself: attention, norms and SwiGLU save the same tensor, so an FP8
copy would add bytes instead of saving any.

Under tensor parallelism every device has the scales of its own slices. A sum over devices is one of products that are
already scaled back, so no device needs the scale of another, and the gathered x has the same scale on all devices.

Letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.close import mismatch
from engine.dtypes import wider
from engine.errors import HostError
from engine.models.common.op import Op
from engine.models.common.product import PRODUCT
from engine.selection import Candidate, Selected, select

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_LEAST = 2.0**-100  # of max|x| in a scale, so that a tensor of zeros has one
_ALIGNMENT = 16  # bytes: rows of both factors begin at multiples, so the sum over T tokens is padded with zeros
_CAPABILITY = (8, 9)  # of the first GPUs with FP8: Ada Lovelace, then Hopper
# Largest error max|a - b| / max|b| in the self-test: e5m2 rounds by up to 1/8, and errors cancel in sums of 24 or more.
_TOLERANCE = 0.1

# (a [M,K], scale of a, b [N,K], scale of b, dtype, fast) -> a b^T [M,N] in `dtype`. `fast` allows sums with fewer bits.
Multiply = Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype, bool], Tensor]


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the scale of x in the FP8 format `dtype`, a positive scalar in float32."""
    return x.abs().amax().float().clamp(min=_LEAST) / torch.finfo(dtype).max


def rows(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x [M,K] / scale to the FP8 format `dtype`."""
    return x.to(wider(x.dtype), copy=True).div_(scale).to(dtype)


def columns(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x.T / scale to FP8, [K,M] for x [M,K], with zeros up to a multiple of 16 columns."""
    padded = F.pad(x, (0, 0, 0, -x.shape[0] % _ALIGNMENT))
    return rows(padded, scale, dtype).T.contiguous()


@dataclass(frozen=True)
class Arithmetic:
    """The functions of an FP8 product: how tensors are scaled and rounded, and how they are multiplied."""

    multiply: Multiply
    scale_of: Callable[[Tensor, torch.dtype], Tensor] = scale_of
    rows: Callable[[Tensor, Tensor, torch.dtype], Tensor] = rows
    columns: Callable[[Tensor, Tensor, torch.dtype], Tensor] = columns

    def compiled(self, compile_: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Arithmetic:
        """Return a copy that scales and rounds with compiled functions, which read a tensor once and write it once."""
        fused = {name: compile_(getattr(self, name)) for name in ("scale_of", "rows", "columns")}
        return replace(self, **fused)

    def forward(self, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """Compute x [T,I] @ weight [O,I].T, [T,O] in the dtype of x, and the scales of both."""
        if len(x) == 0:  # has no largest element, and GPUs refuse empty factors
            none = x.new_zeros((), dtype=torch.float32)
            return *PRODUCT.forward(x, weight), none, none
        of_x, of_weight = (self.scale_of(tensor, VALUES) for tensor in (x, weight))
        x8, weight8 = self.rows(x, of_x, VALUES), self.rows(weight, of_weight, VALUES)
        return self.multiply(x8, of_x, weight8, of_weight, x.dtype, True), of_x, of_weight

    def backward(
        self, dout: Tensor, x: Tensor, weight: Tensor, of_x: Tensor, of_weight: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of x [T,I] and weight [O,I] from dout [T,O] and the scales of both."""
        if len(x) == 0:
            return PRODUCT.backward(dout, x, weight)
        of_dout = self.scale_of(dout, GRADIENTS)
        dout8, weight8 = self.rows(dout, of_dout, GRADIENTS), self.columns(weight, of_weight, VALUES)
        dx = self.multiply(dout8, of_dout, weight8, of_weight, x.dtype, False)
        del dout8, weight8  # before the next two are allocated
        dout8, x8 = self.columns(dout, of_dout, GRADIENTS), self.columns(x, of_x, VALUES)
        return dx, self.multiply(dout8, of_dout, x8, of_x, weight.dtype, False)


def product(arithmetic: Arithmetic) -> Op:
    """Return the product x [T,I] @ weight [O,I].T with an arithmetic. I and O must be multiples of 16."""
    return Op(arithmetic.forward, arithmetic.backward, keeps=(0, 1))


def choose(device: torch.device) -> Multiply:
    """Select the multiplication for a device, and log the reason. Raises HostError if the GPU has no FP8."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        major, minor = torch.cuda.get_device_capability(device)
        has = f"{socket.gethostname()} has {torch.cuda.get_device_name(device)} ({major}.{minor})"
        message = f"linear_dtype=fp8 needs GPUs of compute capability 8.9 or more, and {has}"
        raise HostError(message, hint="set linear_dtype=same")
    return _choose(device).implementation


@cache
def _choose(device: torch.device) -> Selected[Multiply]:
    scaled: Candidate[Multiply] = Candidate(
        "scaled_mm", "PyTorch's product of scaled matrices", lambda: _scaled, partial(fault, device=device)
    )
    emulated: Candidate[Multiply] = Candidate("emulated", "rounds to FP8, multiplies in float32", lambda: _emulated)
    # A GPU that emulates FP8 would be slower than without it, and nobody would notice.
    return select("products in FP8", (scaled,) if device.type == "cuda" else (scaled, emulated))


def fault(multiply: Multiply, device: torch.device) -> str | None:
    """Compare a product of 24 tokens and its gradients with float32; returns a description of the first mismatch."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((24, 32), (64, 32), (24, 64))
    x, weight, dout = (torch.randn(*size, generator=generator).to(device, torch.bfloat16) for size in sizes)
    arithmetic = Arithmetic(multiply)
    out, *scales = arithmetic.forward(x, weight)
    found = out, *arithmetic.backward(dout, x, weight, *scales)
    wide = [tensor.float() for tensor in (dout, x, weight)]
    expected = *PRODUCT.forward(*wide[1:]), *PRODUCT.backward(*wide)
    return mismatch(zip(("product", "dx", "dweight"), found, expected, strict=True), _TOLERANCE)  # type: ignore[arg-type]


def _scaled(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    # GPUs multiply FP8 only if both factors are contiguous along the dim that is summed.
    return torch._scaled_mm(a, b.T, of_a, of_b, out_dtype=dtype, use_fast_accum=fast)


def _emulated(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    return (a.float() @ b.float().T * of_a * of_b).to(dtype)
