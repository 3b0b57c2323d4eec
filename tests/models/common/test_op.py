"""An operation around another runs its own functions, on one device and under tensor parallelism."""

from __future__ import annotations

import pytest
import torch

from engine.models.common.op import Op
from engine.models.common.product import PRODUCT
from engine.parallel.tensor import TensorProduct


@pytest.mark.parametrize("inner", [PRODUCT, TensorProduct(**vars(PRODUCT))], ids=["plain", "tensor parallel"])
def test_an_operation_around_another_runs_its_own_functions(inner: Op) -> None:
    outer = inner.around(
        lambda x, weight: (2 * inner.forward(x, weight)[0],),
        lambda dout, x, weight: tuple(3 * gradient for gradient in inner.backward(dout, x, weight)),
    )
    assert type(outer) is type(inner) and outer.keeps == inner.keeps
    x, weight = (torch.linspace(-1, 1, rows * 6).view(rows, 6).requires_grad_() for rows in (4, 3))
    out, plain = outer(x, weight), inner(x, weight)
    assert torch.equal(out, 2 * plain)
    found, expected = (torch.autograd.grad(one, (x, weight), torch.ones(4, 3)) for one in (out, plain))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, 3 * b)
