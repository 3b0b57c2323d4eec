"""Compiled pointwise parts: the same numbers for any number of tokens, where asked for, and a word where they fail."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from engine.close import error
from engine.models import fuse as fusing
from engine.models.common.initialise import initialise
from engine.models.common.loss import token_loss
from engine.models.common.op import Op
from engine.models.common.pointwise import NORM
from engine.models.common.product import PRODUCT
from engine.models.decoder import Decoder
from engine.models.fuse import fuse
from engine.parallel.tensor import TensorProduct
from tests.models.huggingface import run
from tests.models.shapes import LLAMA

CPU = torch.device("cpu")
COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def model() -> Decoder:
    made = Decoder(LLAMA["gqa"])
    initialise(made, 0)
    return made


def ops(of: Decoder) -> list[Op]:
    return [module.op for module in of.modules() if isinstance(getattr(module, "op", None), Op)]


def gradients(of: Decoder, tokens: int) -> list[Tensor]:
    of.zero_grad()
    numbers = torch.randint(0, 50, (tokens + 1,), generator=torch.Generator().manual_seed(tokens))
    token_loss(run(of, numbers[:-1], "fused_cpu"), numbers[1:]).backward()
    return [parameter.grad.clone() for parameter in of.parameters() if parameter.grad is not None]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own, when it imports its compiler
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_gradients_are_those_of_plain_parts_for_any_number_of_tokens() -> None:
    plain, fused = model(), model()
    fuse(fused, fused.shape, CPU, torch.float32, "always")
    assert len(ops(fused)) == 2 * 4 + 1 and not set(ops(fused)) & set(ops(plain)), (
        "norms, rotations, SwiGLU of 2 layers"
    )
    for tokens in (5, 0, 64, 1, 33):
        for found, expected in zip(gradients(fused, tokens), gradients(plain, tokens), strict=True):
            assert not expected.any() or error(found, expected) < 1e-5


@pytest.mark.long
def test_widths_are_constants_of_the_code_and_tokens_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for any width are slower; code for each number of tokens would be compiled in every step."""
    made: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Tensor]:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    monkeypatch.setattr(fusing, "compiled", fusing.compiled.__wrapped__)
    monkeypatch.setattr(fusing, "choose", fusing.choose.__wrapped__)
    torch._dynamo.reset()
    fused = model()
    fuse(fused, fused.shape, CPU, torch.float32, "always")
    gradients(fused, 5)
    before = len(made)
    for tokens in (64, 0, 1, 33):
        gradients(fused, tokens)
    assert len(made) == before
    fused.norm.op(torch.ones(7, 16), torch.ones(16), 1e-5)
    assert len(made) == before + 1, "another width has code of its own"


def test_a_product_is_compiled_in_place_of_pytorchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is around a product stays around it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    inside = fusing.compiled.__wrapped__(TensorProduct(**vars(PRODUCT)))
    assert type(inside) is TensorProduct and inside.native is None
    x, weight, dout = (torch.linspace(-1, 1, rows * 6).view(rows, 6).requires_grad_() for rows in (4, 3, 2))
    dout = dout.view(4, 3)
    found, expected = (
        (out := one(x, weight), *torch.autograd.grad(out, (x, weight), dout)) for one in (inside, PRODUCT)
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wish", ["auto", "never"])
def test_a_cpu_runs_plain_parts_unless_asked(wish: str) -> None:
    made = model()
    fuse(made, made.shape, CPU, torch.float32, wish)
    assert set(ops(made)) == set(ops(model()))


@pytest.mark.parametrize(
    ("broken", "said"), [("raises", "RuntimeError: no compiler"), ("wrong", "norm is off by .* largest element")]
)
def test_what_does_not_serve_is_reported_and_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str, said: str
) -> None:
    def compiled(op: Op) -> Op:
        if broken == "raises":
            raise RuntimeError("no compiler\nand a long story")
        return Op(lambda *inputs: (op.forward(*inputs)[0] * 1.01, *op.forward(*inputs)[1:]), op.backward, op.keeps)

    monkeypatch.setattr(fusing, "compiled", compiled)
    monkeypatch.setattr(fusing, "choose", fusing.choose.__wrapped__)
    made = model()
    with caplog.at_level(logging.WARNING):
        fuse(made, made.shape, CPU, torch.float32, "always")
    assert NORM in ops(made) and set(ops(made)) == set(ops(model()))
    assert "torch.compile is installed but broken" in caplog.text
    assert caplog.records[0].getMessage().endswith("no compiler") == (broken == "raises")
    assert re.search(said, caplog.text)
