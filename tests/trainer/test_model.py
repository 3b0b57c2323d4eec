from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.attention.layout import unsplit
from engine.config.load import load
from engine.cost.model import Costs
from engine.models.recompute import MODES
from engine.trainer.model import make_model, make_offload
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
