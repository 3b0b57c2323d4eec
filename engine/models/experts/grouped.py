"""Products of rows with the matrix of their expert: with PyTorch's grouped kernel (bf16 on GPUs), else one by one.

They are plain functions without autograd: `experts.py` decides which tensors are saved for the backward pass.

Letters: N rows, sorted by expert; E experts; I and O widths of rows. `counts`, int64 [E], is the number of rows of each
expert: the first counts[0] rows belong to expert 0, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.close import mismatch
from engine.selection import Candidate, Selected, select

_TOLERANCE = 3e-2  # largest allowed error max|a - b| / max|b| in the self-test, in bf16
_ALIGNMENT = 16  # bytes: the grouped kernel requires rows that begin at a multiple of this


class Products(NamedTuple):
    """An implementation of `grouped` and `outer`; `PRODUCTS` selects one for its inputs."""

    grouped: Callable[[Tensor, Tensor, Tensor], Tensor]
    outer: Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply each row of `rows` [N,I] by the matrix of its expert, from `weight` [E,I,O]. Returns [N,O]."""
    return _products(rows, rows.shape[1], weight.shape[2]).grouped(rows, weight, counts)


def outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """Compute left.T @ right of each expert's rows of `left` [N,O] and `right` [N,I]: [E,O,I].

    It is the gradient of a weight [E,O,I]. Experts without rows get zeros.
    """
    return _products(left, left.shape[1], right.shape[1]).outer(left, right, counts)


def _products(rows: Tensor, *widths: int) -> Products:
    aligned = all(width * rows.element_size() % _ALIGNMENT == 0 for width in widths)
    if rows.dtype == torch.bfloat16 and len(rows) and aligned:
        return choose(rows.device).implementation
    return LOOP


def _loop_grouped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight.unbind(), strict=True)])


def _loop_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    out, sizes = left.new_empty(len(counts), left.shape[1], right.shape[1]), counts.tolist()
    for expert, (one, other) in enumerate(zip(left.split(sizes), right.split(sizes), strict=True)):
        torch.mm(one.T, other, out=out[expert])
    return out


def _kernel_grouped(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return F.grouped_mm(rows.contiguous(), weight, offs=counts.cumsum(0, dtype=torch.int32))


def _kernel_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """On some GPUs PyTorch leaves the result of experts without rows uninitialised (2026)."""
    out = F.grouped_mm(left.contiguous().T, right.contiguous(), offs=counts.cumsum(0, dtype=torch.int32))
    return out.masked_fill_((counts == 0)[:, None, None], 0)


PRODUCTS = Products(grouped, outer)
LOOP = Products(_loop_grouped, _loop_outer)
KERNEL = Products(_kernel_grouped, _kernel_outer)


@cache
def choose(device: torch.device) -> Selected[Products]:
    """Select the implementation of `grouped` and `outer` for bf16 on a device, and log the reason. Cached."""
    unsupported = None
    if device.type != "cuda":
        unsupported = "runs on CUDA devices only"
    elif not hasattr(F, "grouped_mm"):
        unsupported = "not in this version of PyTorch"
    elif torch.cuda.get_device_capability(device) < (8, 0):
        unsupported = "needs compute capability 8.0"
    grouped_mm: Candidate[Products] = Candidate(
        "grouped_mm",
        "PyTorch's grouped kernel",
        lambda: KERNEL,
        partial(fault, device=device),
        unsupported,
    )
    one_by_one: Candidate[Products] = Candidate("loop", "the grouped kernel does not work here", lambda: LOOP)
    return select("matrix products of the experts", (grouped_mm, one_by_one))


def fault(products: Products, device: torch.device) -> str | None:
    """Compare the product of three experts, one of them without rows, and its gradients with those of `LOOP`.

    Returns a description of the first mismatch, or None.
    """
    generator, counts = torch.Generator().manual_seed(0), torch.tensor([5, 0, 11], device=device)
    sizes = ((16, 32), (16, 64), (3, 64, 32))
    rows, dout, weight = (torch.randn(*size, generator=generator).to(device, torch.bfloat16) for size in sizes)
    results = [
        (
            one.grouped(rows, weight.transpose(1, 2), counts),
            one.grouped(dout, weight, counts),
            one.outer(dout, rows, counts),
        )
        for one in (products, LOOP)
    ]
    return mismatch(zip(("product", "drows", "dweight"), *results, strict=True), _TOLERANCE)
