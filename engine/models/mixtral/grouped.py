"""Multiplies rows by the matrix of their expert: with PyTorch's grouped kernel (bf16 on GPUs), else expert by expert.

Letters: N rows, sorted by expert; E experts; I and O width of a row before and after the product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.close import mismatch
from engine.selection import Candidate, Selected, select

_TOLERANCE = 3e-2  # largest allowed error max|a - b| / max|b| in the self-test, in bf16
_ALIGNMENT = 16  # bytes: the grouped kernel requires rows that begin at a multiple of this

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each row of `rows` [N,I] by the transposed matrix of its expert, from `weight` [E,O,I]. Returns [N,O].

    `counts`, int64 [E], is the number of rows of each expert: the first counts[0] rows belong to expert 0, and so on.
    Experts without rows get a gradient of zeros.
    """
    aligned = all(width * rows.element_size() % _ALIGNMENT == 0 for width in weight.shape[1:])
    if rows.dtype == torch.bfloat16 and len(rows) and aligned:
        return choose(rows.device).implementation(rows, weight, counts)
    return loop(rows, weight, counts)


def loop(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Compute the product of `grouped` with one matrix product per expert."""
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight.unbind(), strict=True)])


class GroupedProduct(torch.autograd.Function):
    """Computes the product of `grouped` with PyTorch's grouped kernel.

    The gradient is our own: on some GPUs PyTorch's leaves the gradient of experts without rows uninitialised (2026).
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Multiply rows [N,I] by the transposed matrix of their expert, from weight [E,O,I]. Returns [N,O]."""
        ctx.save_for_backward(rows, weight, counts)
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Compute the gradients of the rows [N,I] and the weight [E,O,I]; `counts` has none."""
        rows, weight, counts = ctx.saved_tensors
        dout, ends = gradient[0].contiguous(), counts.cumsum(0, dtype=torch.int32)
        drows = F.grouped_mm(dout, weight, offs=ends)
        dweight = F.grouped_mm(dout.T, rows, offs=ends)  # [E,O,I]
        return drows, dweight.masked_fill_((counts == 0)[:, None, None], 0), None


@cache
def choose(device: torch.device) -> Selected[Product]:
    """Select the implementation of `grouped` for bf16 on a device, and log the reason. Cached."""
    unsupported = None
    if device.type != "cuda":
        unsupported = "runs on CUDA devices only"
    elif not hasattr(F, "grouped_mm"):
        unsupported = "not in this version of PyTorch"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        unsupported = "needs compute capability 8.0"
    grouped_mm: Candidate[Product] = Candidate(
        "grouped_mm",
        "PyTorch's grouped kernel",
        lambda: GroupedProduct.apply,
        partial(fault, device=device),
        unsupported,
    )
    one_by_one: Candidate[Product] = Candidate("loop", "the grouped kernel does not work here", lambda: loop)
    return select("matrix products of the experts", (grouped_mm, one_by_one))


def fault(product: Product, device: torch.device) -> str | None:
    """Compare a product and its gradients with `loop`, for three experts, one of them without rows.

    Returns a description of the first mismatch, or None.
    """
    generator, counts = torch.Generator().manual_seed(0), torch.tensor([5, 0, 11], device=device)
    rows = torch.randn(16, 32, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight = torch.randn(3, 64, 32, generator=generator).to(device, torch.bfloat16).requires_grad_()
    results = []
    for one in (product, loop):
        with torch.enable_grad():
            out = one(rows, weight, counts)
        results.append((out, *torch.autograd.grad(out, (rows, weight), torch.ones_like(out))))
    return mismatch(zip(("product", "drows", "dweight"), *results, strict=True), _TOLERANCE)
