from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.context import AttentionContext
from engine.attention.kernels.call import merge
from engine.attention.kernels.choice import choose
from engine.attention.layout import unsplit
from engine.config.load import load
from engine.cost.model import Costs
from engine.models.recompute import MODES
from engine.trainer import model as trainer_model
from engine.trainer.model import kernel_of, make_model, make_offload
from engine.units import PPM

CPU, TOKENS, LAYERS = torch.device("cpu"), 201, 6
SIZE = [f"model.{key}" for key in (f"layers={LAYERS}", "hidden=32", "heads=4", "kv_heads=2", "ffn=96", "vocab=50")]


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_that_fills_the_host_goes_there_whole(mode: str) -> None:
    """Although tensors are aligned in the arena, which the planner's bytes do not count."""
    config = load(["recipe=quickstart", "compile=never", f"recompute={mode}", *SIZE])
    offload = make_offload(config, CPU, int(Costs.of(config).host_bytes(np.int64(TOKENS), PPM)))
    model = make_model(config, CPU, offload=offload)
    attention = AttentionContext(unsplit(TOKENS), None, choose(CPU, torch.float32, 8))
    numbers = torch.arange(TOKENS)
    offload.begin(1.0, TOKENS)
    model(numbers % 50, numbers, numbers % 50, attention)
    assert offload.moved_bytes == offload.saved_bytes * (LAYERS - 2) // LAYERS


def test_the_kernel_of_a_rank_has_the_costs_and_the_merge_of_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has no rings, so it compiles no merge; the calibration's time of a plan can be replaced."""
    asked: list[Any] = []

    def recorded(answer: Any) -> Callable[..., Any]:
        def answering(*arguments: Any, **more: Any) -> Any:
            asked.append((*arguments, *more.values()))
            return answer

        return answering

    def other(*tensors: torch.Tensor) -> None: ...

    plain = choose(CPU, torch.bfloat16, 64)
    monkeypatch.setattr(trainer_model, "choose", recorded(plain))
    monkeypatch.setattr(trainer_model, "choose_merge", recorded(other))
    config = load(["recipe=h200-1b-8k", "compile=always"])
    assert kernel_of(config, CPU, ranks=1) == plain and plain.merge is merge
    assert kernel_of(config, CPU, ranks=2, plan_build_s=0.0).merge is other
    assert asked == [
        (CPU, torch.bfloat16, 64, 0.5),
        (CPU, torch.bfloat16, 64, 0.0),
        (CPU, torch.bfloat16, 32, 64, "always"),
    ]
