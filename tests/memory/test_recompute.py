"""Recompute on one process: the same gradients to the last bit, and attention run as often as each mode says."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from engine.attention.kernels.choice import choose
from engine.attention.layout import whole
from engine.attention.meeting import Meeting
from engine.config.load import load
from engine.config.schema import Model
from engine.memory.recompute import MODES
from engine.models.build import build_model
from engine.models.llama.model import Llama

TOKENS = 37
RUNS = {"none": 1, "layer": 2, "layer_keep_attention": 1}  # of a layer's attention, forward


def shape(**changes: object) -> Model:
    size = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 50}
    return load([]).model.model_copy(update=size | changes)


@dataclass(frozen=True)
class Counted(Meeting):
    """Notes each call of attention, and each sum of experts' counts."""

    calls: list[str] = field(default_factory=list)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.calls.append("attention")
        return super().__call__(q, k, v)

    def summed(self, counts: Tensor) -> Tensor:
        self.calls.append("counts")
        return super().summed(counts)


def run(model: Model, mode: str, dtype: torch.dtype, tokens: int = TOKENS) -> tuple[dict[str, Tensor], list[str]]:
    """Return the loss and every gradient by name, and what was called; experts are balanced by a loss."""
    llama = build_model(load([]).model_copy(update={"model": model, "recompute": mode}))
    llama.initialise(3)
    llama.to(dtype)
    meeting = Counted(whole(tokens), None, choose(torch.device("cpu"), dtype, model.head_dim))
    numbers = torch.randint(0, model.vocab, (tokens + 1,), generator=torch.Generator().manual_seed(1))
    loss = llama(numbers[:-1], torch.arange(tokens), meeting, numbers[1:])
    (loss * 0.3).backward()
    gradients = {name: parameter.grad for name, parameter in llama.named_parameters()}
    return {"loss": loss.detach(), **gradients}, meeting.calls


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
@pytest.mark.parametrize("changes", [{}, {"kv_heads": 4}, {"kv_heads": 1, "tied": True}, {"experts": 4, "top_k": 2}])
def test_gradients_are_those_of_none_to_the_last_bit(changes: dict[str, object], mode: str, dtype: torch.dtype) -> None:
    """Experts' counts travel once, whatever is computed anew."""
    model = shape(**changes)
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
        llama = Llama(shape(), mode=mode)
        llama.initialise(3)
        one = Meeting(whole(2), None, choose(torch.device("cpu"), torch.float32, 8))
        loss = llama(torch.tensor([1, 2]), torch.arange(2), one, torch.tensor([2, 3]))
    assert not loss.requires_grad and loss.item() > 0


def test_an_unknown_mode_is_no_mode() -> None:
    with pytest.raises(KeyError, match="some"):
        Llama(shape(), mode="some")
