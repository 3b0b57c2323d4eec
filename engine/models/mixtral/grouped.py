"""Rows of several experts times their own matrices: PyTorch's grouped kernel on GPU, a loop over experts elsewhere.

Letters: N rows, sorted by expert; E experts; I and O the width of a row before and after.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.close import in_a_line, too_far

_LOG = logging.getLogger(__name__)
_TOLERANCE = 3e-2  # largest error of the self-test, max|a - b| / max|b|, in bf16
_ALIGNED = 16  # bytes: the kernel takes rows that begin at a multiple of it


def grouped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return rows [N,I] times the transposed matrix of their expert, weight [E,O,I]: [N,O].

    The first counts[0] rows are the first expert's, and so on: int64[E], N in all. Every expert takes part in the
    backward pass, with zeros where it has no row.
    """
    if _has_kernel(rows, weight):
        return GroupedProduct.apply(rows, weight, counts)  # type: ignore[no-any-return]
    return _loop(rows, weight, counts)


def _loop(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight.unbind(), strict=True)])


class GroupedProduct(torch.autograd.Function):
    """The product by PyTorch's grouped kernel.

    Not by its own gradient: kernels leave that of an expert without rows as they find it (on some GPUs, 2026).
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=_ends(counts))

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, counts = ctx.saved_tensors
        dout = gradient[0].contiguous()
        drows = F.grouped_mm(dout, weight, offs=_ends(counts))
        dweight = F.grouped_mm(dout.T, rows, offs=_ends(counts))  # [E,O,I]
        return drows, dweight.masked_fill_((counts == 0)[:, None, None], 0), None


def _ends(counts: Tensor) -> Tensor:
    """Return behind which row each expert's end, as the kernel takes it: int32 [E]."""
    return counts.cumsum(0, dtype=torch.int32)


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Return whether the grouped kernel takes these: bf16, an NVIDIA GPU from Ampere on, aligned rows, and any row."""
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or not len(rows):
        return False
    aligned = all(width * rows.element_size() % _ALIGNED == 0 for width in weight.shape[1:])
    return aligned and _device_has_kernel(rows.device)


@cache
def _device_has_kernel(device: torch.device) -> bool:
    """Return whether a GPU runs the grouped kernel rightly; one that is there but broken is reported."""
    if not hasattr(F, "grouped_mm") or torch.cuda.get_device_capability(device) < (8, 0):
        _LOG.info("products of experts: a loop over them (no grouped kernel for this device)")
        return False
    wrong = _fault(device)
    if wrong is None:
        _LOG.info("products of experts: PyTorch's grouped kernel")
    else:
        _LOG.warning("PyTorch's grouped kernel is there but broken, experts run one by one: %s", wrong)
    return wrong is None


def _fault(device: torch.device) -> str | None:
    """Return what is wrong with the grouped kernel on a device, or None: three experts, one of them without rows."""
    generator, counts = torch.Generator().manual_seed(0), torch.tensor([5, 0, 11], device=device)
    rows = torch.randn(16, 32, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight = torch.randn(3, 64, 32, generator=generator).to(device, torch.bfloat16).requires_grad_()
    try:
        found = _three(GroupedProduct.apply, rows, weight, counts)
    except (RuntimeError, AssertionError, AttributeError, TypeError) as failure:
        return in_a_line(failure)
    exact = _three(_loop, rows, weight, counts)
    return too_far(zip(("product", "drows", "dweight"), found, exact, strict=True), _TOLERANCE)


def _three(product: Callable[..., Tensor], rows: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
    """Return a product and its gradients by the rows and by the weight."""
    with torch.enable_grad():
        out = product(rows, weight, counts)
    return out, *torch.autograd.grad(out, (rows, weight), torch.ones_like(out))
