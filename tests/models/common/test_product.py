"""Weight gradients that products add where they are summed: as near to float64 as they are in float32."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engine.models.common.product import ADDED, PRODUCT
from engine.zero import buckets
from engine.zero.buckets import Bucket


def in_float32(total: Tensor, left: Tensor, right: Tensor, fresh: bool = False) -> None:
    """A stand-in for the product of a GPU: of bf16, summed in float32."""
    one = left.float() @ right.float()
    total.copy_(one if fresh else total + one)


def summed(dtype: torch.dtype, added: bool) -> tuple[Tensor, Tensor]:
    """The gradient of a weight [24,40] of eight micro-batches in a bucket, and the exact one."""
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    weight = torch.nn.Parameter(random(24, 40))
    bucket, exact = Bucket([weight], None, 0, 1, False), torch.zeros(24, 40, dtype=torch.float64)
    bucket.view(0).fill_(torch.nan)  # of the step before: the first gradient is written over it
    parameter: Any = weight
    if added:
        parameter.add_product = partial(bucket.add_product, 0)
    for _ in range(8):
        x, dout = random(33, 40).requires_grad_(), random(33, 24)
        (ADDED if added else PRODUCT)(x, weight).backward(dout)
        assert x.grad is not None and torch.equal(x.grad, dout @ weight.detach())
        assert (weight.grad is None) == added
        if not added:
            bucket.add(0)
        exact += dout.double().T @ x.detach().double()
    return bucket.complete()[: 24 * 40].view(24, 40), exact


def rms(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def test_gradients_in_float32_are_equal_to_rounding() -> None:
    assert rms(*summed(torch.float32, added=True)) < 2e-7
    assert rms(*summed(torch.float64, added=True)) < 1e-15


def test_gradients_in_bf16_lose_no_digits_before_they_are_added() -> None:
    with patch.object(buckets, "add_product", in_float32):
        added, plain = rms(*summed(torch.bfloat16, added=True)), rms(*summed(torch.bfloat16, added=False))
    assert added < 1e-6 and plain > 1e-3


def test_a_weight_without_a_sum_gets_its_gradient_from_autograd() -> None:
    x, weight = torch.randn(5, 4), torch.nn.Parameter(torch.randn(3, 4))
    ADDED(x, weight).backward(torch.ones(5, 3))
    assert weight.grad is not None and torch.allclose(weight.grad, torch.ones(3, 5) @ x)
