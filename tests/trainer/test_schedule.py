from __future__ import annotations

import pytest

from engine.config.load import load
from engine.config.schema import Optimizer
from engine.trainer.schedule import learning_rate

RECIPE = load(["recipe=quickstart"]).optimizer.model_dump() | {"lr": 1.0, "warmup_steps": 10, "min_lr_ratio": 0.1}


def settings(**changes: object) -> Optimizer:
    return Optimizer(**(RECIPE | changes))


def test_warm_up_rises_to_the_rate_and_the_cosine_falls_to_its_floor() -> None:
    rates = [learning_rate(step, 110, settings()) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert rates[59] == pytest.approx(0.1 + 0.9 * 0.5)  # half of the cosine
    assert rates[-1] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_without_warm_up_the_first_step_learns() -> None:
    assert learning_rate(1, 1, settings(warmup_steps=0, min_lr_ratio=0.5)) == 0.5
