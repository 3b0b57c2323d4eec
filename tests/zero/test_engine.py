from __future__ import annotations

import math
from itertools import cycle, product

import pytest
import torch

from engine.config.load import load
from engine.models.common.attention import LocalAttention
from engine.models.common.initialise import initialise
from engine.models.decoder import Decoder
from engine.trainer.optimizer import build_optimizer
from engine.zero.engine import ZeroEngine
from engine.zero.shards import sharded, stored
from tests.world import run_world

pytestmark = pytest.mark.world

SCALES = (1.0, math.inf)


def norm_and_change(stage: int, dtype: str, clip: float, scale: float) -> tuple[float, float]:
    """On a rank: the norm of a scaled gradient, and the sum of the absolute changes of the stored weights."""
    shape = ["model.layers=1", "model.hidden=32", "model.ffn=48"]
    config = load(["recipe=quickstart", *shape, f"dtype={dtype}", f"zero.stage={stage}", f"optimizer.clip_norm={clip}"])
    with sharded(config):
        model = Decoder(config.model)
    initialise(model, 0, torch.device("cpu"), stored)
    engine = ZeroEngine(model, build_optimizer(model, config.optimizer), config)
    before = [stored(p).values.detach().clone() for p in engine.module.parameters()]
    tokens = torch.arange(5)
    loss = engine.forward(tokens, tokens, tokens, LocalAttention(tokens))
    engine.backward(loss * scale, 5)
    norm = engine.step(1e-2)
    after = [stored(p).values for p in engine.module.parameters()]
    return norm, sum(float((a - b).abs().sum()) for a, b in zip(after, before, strict=True))


def all_cases() -> list[tuple[float, float]]:
    return [norm_and_change(*case) for case in product((1, 2, 3), ("fp32", "bf16"), (0.0, 1.0), SCALES)]


def test_gradients_that_are_not_finite_show_in_the_norm() -> None:
    """DeepSpeed skips such an update silently, so the trainer must see it from the norm."""
    (found,) = run_world(1, all_cases)
    for (norm, change), scale in zip(found, cycle(SCALES), strict=False):
        assert math.isfinite(norm) == math.isfinite(scale)
        assert (change > 0) == math.isfinite(scale)
