"""The pointwise parts beside autograd's own gradient of the plain formulas; tests/cost counts what they keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.close import error
from engine.models.common.op import Op
from engine.models.common.pointwise import NORM, ROTATE, SWIGLU

EPS = 1e-5
SIZES = [(0, 8), (1, 8), (37, 24)]


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return pairs (i, i + D/2) as complex numbers times cos + i sin."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin)[..., :half]
    return torch.cat((turned.real, turned.imag), dim=-1)


def examples(tokens: int, size: int, dtype: torch.dtype) -> dict[str, tuple[Op, Callable[..., Tensor], list[Any]]]:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    angles = torch.rand(tokens, 1, size // 2, generator=generator, dtype=torch.float64).repeat(1, 1, 2) * 6
    cos, sin = (part.to(torch.promote_types(dtype, torch.float32)) for part in (angles.cos(), angles.sin()))
    return {
        "norm": (NORM, plain_norm, [draw(tokens, size), draw(size), EPS]),
        "swiglu": (SWIGLU, plain_swiglu, [draw(tokens, size), draw(tokens, size)]),
        "rotate": (ROTATE, plain_rotate, [draw(tokens, 3, size), cos, sin]),
    }


def results(function: Callable[..., Tensor], inputs: list[Any], angles: bool) -> list[Tensor]:
    """Return the output and the gradients of the sum of it times fixed numbers; cosines and sines have none."""
    inputs = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in inputs]
    wanted = inputs[:1] if angles else [x for x in inputs if isinstance(x, Tensor)]
    out = function(*inputs)
    weights = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).to(out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, wanted, weights)]


@pytest.mark.parametrize("name", ["norm", "swiglu", "rotate"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_outputs_and_gradients(name: str, size: tuple[int, int], dtype: torch.dtype, limit: float) -> None:
    op, plain, inputs = examples(*size, dtype)[name]
    exact = [x.double() if isinstance(x, Tensor) else x for x in inputs]
    for found, expected in zip(
        results(op, inputs, name == "rotate"), results(plain, exact, name == "rotate"), strict=True
    ):
        assert found.dtype == dtype and found.shape == expected.shape
        assert not expected.any() or error(found, expected) < limit


def test_swiglu_is_autograds_to_the_last_bit() -> None:
    """Recomputing the activation changes nothing: the same operations in the same dtype."""
    _, _, inputs = examples(37, 24, torch.bfloat16)["swiglu"]
    ours, theirs = results(SWIGLU, inputs, False), results(lambda gate, up: F.silu(gate) * up, inputs, False)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
