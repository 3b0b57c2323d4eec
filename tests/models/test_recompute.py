"""Recompute on one process: the same gradients to the last bit, and attention run as often as each mode says."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.config.load import load
from engine.config.schema import Model
from engine.dtypes import DTYPES
from engine.models.build import build_model
from engine.models.common.initialise import initialise
from engine.models.experts import grouped
from engine.models.experts.layer import LocalRoute, Router, _Path
from engine.models.parallelize import parallelize
from engine.models.recompute import MODES
from tests.attention.rings import unsplit
from tests.covering import covered

TOKENS = 37
RUNS = {"none": 1, "layer": 2, "layer_keep_attention": 1}  # of a layer's attention, forward


def shape(**changes: object) -> Model:
    size = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 50}
    return load([]).model.model_copy(update=size | changes)


@dataclass(frozen=True)
class Counted(AttentionContext):
    """Notes each call of attention, and each sum of experts' counts."""

    calls: list[str] = field(default_factory=list)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls.append("attention")
        return super().__call__(q, k, v)

    def sum_over_sequences(self, counts: Tensor) -> Tensor:
        self.calls.append("counts")
        return super().sum_over_sequences(counts)


def run(model: Model, mode: str, dtype: torch.dtype, tokens: int = TOKENS) -> tuple[dict[str, Tensor], list[str]]:
    """Return the loss and every gradient by name, and what was called; experts are balanced by a loss."""
    name = next(name for name, known in DTYPES.items() if known == dtype)
    config = load([]).model_copy(update={"model": model, "recompute": mode, "dtype": name})
    llama = build_model(config)
    parallelize(llama, config, torch.device("cpu"))
    initialise(llama, 3)
    llama.to(dtype)
    attention = Counted(unsplit(tokens), None, choose(torch.device("cpu"), dtype, model.head_dim))
    numbers = torch.randint(0, model.vocab, (tokens + 1,), generator=torch.Generator().manual_seed(1))
    loss = llama(numbers[:-1], torch.arange(tokens), numbers[1:], attention)
    (loss * 0.3).backward()
    gradients = {name: parameter.grad for name, parameter in llama.named_parameters()}
    return {"loss": loss.detach(), **gradients}, attention.calls


SHAPES: dict[str, dict[str, object]] = {
    "gqa": {},
    "mha": {"kv_heads": 4},
    "mqa tied": {"kv_heads": 1, "tied": True},
    "experts": {"family": "mixtral", "experts": 4, "top_k": 2},
}


@covered("name, mode, dtype", list(SHAPES), [mode for mode in MODES if mode != "none"], list(DTYPES.values()))
def test_gradients_are_those_of_none_to_the_last_bit(name: str, mode: str, dtype: torch.dtype) -> None:
    """Experts' counts travel once, whatever is recomputed."""
    model = shape(**SHAPES[name])
    expected, plain = run(model, "none", dtype)
    assert plain.count("attention") == model.layers
    found, calls = run(model, mode, dtype)
    assert found.keys() == expected.keys()
    assert calls.count("attention") == RUNS[mode] * model.layers
    assert calls.count("counts") == (1 if model.experts > 1 else 0)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("mode", MODES)
def test_no_token_runs_forward_and_backward(mode: str) -> None:
    """A ring member whose shards are all empty still takes part in the rounds of both passes, as often as others."""
    found, calls = run(shape(), mode, torch.float32, tokens=0)
    assert len(calls) == RUNS[mode] * shape().layers and all((value == 0).all() for value in found.values())


@pytest.mark.parametrize("mode", MODES)
def test_validation_recomputes_nothing(mode: str) -> None:
    with torch.no_grad():
        config = load([]).model_copy(update={"model": shape(), "recompute": mode})
        llama = build_model(config)
        parallelize(llama, config, torch.device("cpu"))
        initialise(llama, 3)
        one = AttentionContext(unsplit(2), None, choose(torch.device("cpu"), torch.float32, 8))
        loss = llama(torch.tensor([1, 2]), torch.arange(2), torch.tensor([2, 3]), one)
    assert not loss.requires_grad and loss.item() > 0


@pytest.mark.parametrize("mode", MODES)
def test_the_product_of_experts_is_chosen_before_any_layer_runs(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its self-test differentiates; inside a layer, hooks would take the tensors of the test for the layer's."""
    inside: list[str] = []

    def run_layer(layer: Any, *arguments: Any) -> Any:
        misses = grouped.choose.cache_info().misses
        out = MODES[mode](layer, *arguments)
        inside.extend(["chosen"] * (grouped.choose.cache_info().misses - misses))
        return out

    grouped.choose.cache_clear()
    monkeypatch.setattr("engine.models.parallelize.MODES", {mode: run_layer})
    run(shape(family="mixtral", experts=4, top_k=2), mode, torch.bfloat16)
    assert grouped.choose.cache_info().hits and not inside


@pytest.mark.parametrize("mode", MODES)
def test_a_router_that_rounds_otherwise_when_it_is_computed_again_sends_tokens_to_the_same_experts(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd's thread may use another attention kernel. Other ranks have sent rows by the first decision."""
    routes, forward, begun = dict[int, list[Tensor]](), Router.forward, list[int]()

    def unsteady(self: Router, x: Tensor) -> Tensor:
        again = id(self) in begun
        begun.append(id(self))
        return -forward(self, x) if again else forward(self, x)

    class Noted(LocalRoute):
        def __init__(self, path: object, chosen: Tensor, experts: int, *_: object) -> None:
            super().__init__(chosen, experts)
            routes.setdefault(id(path), []).append(chosen)

    def of(path: _Path, chosen: Tensor) -> Any:
        path._make = partial(Noted, path)
        return made(path, chosen)

    made = _Path.of
    monkeypatch.setattr(_Path, "of", of)
    monkeypatch.setattr(Router, "forward", unsteady)
    run(shape(**SHAPES["experts"]), mode, torch.float64)
    assert len(begun) == (1 if mode == "none" else 2) * len(routes) and len(routes) == shape().layers
    assert all(torch.equal(one, chosen[0]) for chosen in routes.values() for one in chosen)
