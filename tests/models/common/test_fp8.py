"""FP8 products: as near to float64 as their formats allow, for any number of tokens and any magnitude."""

from __future__ import annotations

import shutil
import socket
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config.load import load
from engine.errors import HostError
from engine.models.build import build_model
from engine.models.common import fp8
from engine.models.common.fp8 import Arithmetic, Multiply
from engine.models.common.initialise import initialise
from engine.models.common.product import PRODUCT
from engine.models.fuse import compiled_function
from engine.models.parallelize import parallelize
from tests.refusals import refused

CPU = torch.device("cpu")
# Largest relative RMS errors of a product of random factors, and of both gradients: e4m3 has 3 digits after the point,
# so it rounds by 2.6 % (RMS), e5m2 with 2 by 5.2 %; two independent errors give 3.7 and 5.8 %.
FORWARD, BACKWARD = 0.045, 0.07
WAYS = pytest.mark.parametrize("multiply", [fp8._scaled, fp8._emulated])


def rms(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def random(tokens: int) -> list[Tensor]:
    """The gradient of a product, its input and its weight, in bf16."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = ((tokens, 128), (tokens, 64), (128, 64))
    return [torch.randn(*size, generator=generator).bfloat16() for size in sizes]


def results(multiply: Multiply, dout: Tensor, x: Tensor, weight: Tensor) -> list[Tensor | None]:
    arithmetic = Arithmetic(multiply)
    out, *kept = arithmetic.forward(x, weight)
    return [out, *arithmetic.backward(dout, x, weight, *kept)]


@WAYS
@pytest.mark.parametrize("tokens", [7, 16, 401])
def test_products_and_gradients_are_near_to_float64(multiply: Multiply, tokens: int) -> None:
    dout, x, weight = random(tokens)
    found, exact = results(multiply, dout, x, weight), [one.double() for one in (dout, x, weight)]
    expected = *PRODUCT.forward(*exact[1:]), *PRODUCT.backward(*exact)
    for one, right, bound in zip(found, expected, (FORWARD, BACKWARD, BACKWARD), strict=True):
        assert one is not None and right is not None and one.dtype == torch.bfloat16
        assert bound / 2 < rms(one, right) < bound


@WAYS
def test_empty_and_single_rows(multiply: Multiply) -> None:
    out, dx, dweight = results(multiply, *random(0))
    assert out is not None and dx is not None and dweight is not None
    assert out.shape == (0, 128) and dx.shape == (0, 64) and not dweight.any()
    out, dx, dweight = results(multiply, *random(1))
    assert out is not None and dx is not None and dweight is not None
    assert out.shape == (1, 128) and dx.shape == (1, 64) and dweight.shape == (128, 64)


@WAYS
def test_magnitudes_do_not_matter(multiply: Multiply) -> None:
    """Gradients of a long step are tiny: without scales all of them would be 0 in FP8, or infinite."""
    dout, x, weight = random(33)
    plain = results(multiply, dout, x, weight)
    scaled = results(multiply, dout * 2**-60, x * 2**40, weight * 2**-30)
    for one, other, power in zip(scaled, plain, (10, -90, -20), strict=True):
        assert one is not None and other is not None and torch.equal(one, other * 2.0**power)
    zeros = results(multiply, dout * 0, x * 0, weight)
    assert not any(one is None or one.any() for one in zeros)
    x[3, 5] = torch.nan  # on_nan must see it
    assert (found := results(multiply, dout, x, weight)[0]) is not None and found.isnan().any()


def test_what_is_not_fp8_stays_in_bf16() -> None:
    model = model_of("fp8", "model.family=mixtral", "model.experts=4", "model.top_k=2")
    fast = {name for name, one in model.named_modules() if "Arithmetic" in repr(getattr(one, "product", ""))}
    assert fast == {f"layers.{n}.attention.{name}" for n in (0, 1) for name in ("q", "k", "v", "out")}
    fast = {name for name, one in model_of("fp8").named_modules() if "Arithmetic" in repr(getattr(one, "product", ""))}
    names = ("attention.q", "attention.k", "attention.v", "attention.out", "ffn.gate", "ffn.up", "ffn.down")
    assert fast == {f"layers.{n}.{name}" for n in (0, 1) for name in names}


@pytest.mark.parametrize(("capability", "has"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_without_fp8_is_refused_with_its_host(
    capability: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7")
    monkeypatch.setattr(fp8, "_choose", lambda device: fp8.Selected("", "", fp8._scaled, ()))
    if has:
        assert fp8.choose(torch.device("cuda", 0)) is fp8._scaled
        return
    with refused(HostError) as problems:
        fp8.choose(torch.device("cuda", 0))
    assert "gpu-7 has NVIDIA A100" in problems[0].message
    assert "linear_dtype=fp8" in problems[0].message, "the launcher shows no key of a host's error"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # PyTorch's own, when it imports its compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_rounding_is_the_same() -> None:
    plain = Arithmetic(fp8._emulated)
    fused = plain.compiled(compiled_function)
    for tokens in (33, 7, 64):
        dout, x, weight = random(tokens)
        kept = plain.forward(x, weight)[1:]
        for one, other in zip(fused.forward(x, weight), plain.forward(x, weight), strict=True):
            assert torch.equal(one, other)
        pairs = zip(fused.backward(dout, x, weight, *kept), plain.backward(dout, x, weight, *kept), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs if one is not None and other is not None)


def model_of(linear_dtype: str, *more: str) -> Any:
    sizes = ["layers=2", "hidden=64", "heads=4", "kv_heads=2", "ffn=128", "vocab=320"]
    model = [f"model.{size}" for size in sizes]
    config = load(["recipe=quickstart", "dtype=bf16", f"linear_dtype={linear_dtype}", *model, *more])
    built = build_model(config).to(torch.bfloat16)
    parallelize(built, config, CPU)
    initialise(built, 1)
    return built


def losses(linear_dtype: str, steps: int) -> Tensor:
    """The loss per token of each step of training, with masters in fp32.

    Nine tokens of ten are what a table says of the token before. What attention would have to learn it learns at once,
    and a few steps earlier or later decide the mean of a loss.
    """
    generator, found, size = torch.Generator().manual_seed(0), list[float](), 32
    table = torch.randperm(size, generator=generator)
    model = model_of(linear_dtype)
    masters = [torch.nn.Parameter(one.detach().float()) for one in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=3e-3)
    for _ in range(steps):
        tokens = torch.randint(0, size, (129,), generator=generator)
        noise = torch.rand(129, generator=generator) < 0.1
        for place in range(1, 129):
            if not noise[place]:
                tokens[place] = table[tokens[place - 1]]
        loss = model(tokens[:-1], torch.arange(128), tokens[1:]) / 128
        loss.backward()
        for master, one in zip(masters, model.parameters(), strict=True):
            master.grad, one.grad = one.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, one in zip(masters, model.parameters(), strict=True):
                one.copy_(master)
        found.append(loss.item())
    return torch.tensor(found)


def test_the_first_steps_learn_as_in_bf16() -> None:
    same, fast = losses("same", 12), losses("fp8", 12)
    assert not torch.equal(same, fast)
    assert (fast - same).abs().max() < 0.02 * same.max()


@pytest.mark.slow
def test_200_steps_learn_as_in_bf16() -> None:
    """At the end the means of 20 losses differ by less than 2 % of what the model has learned."""
    same, fast = losses("same", 200), losses("fp8", 200)
    learned = same[0] - same[-20:].mean()
    assert learned > 2, "the model learns nothing: it shows too little"
    assert abs(fast[-20:].mean() - same[-20:].mean()) < 0.02 * learned
