from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.kernels.choice import choose
from engine.attention.layout import whole
from engine.attention.meeting import Meeting
from engine.config.load import load
from engine.cost.model import PPM, Costs
from engine.memory.recompute import MODES
from engine.trainer.model import make_model, make_offload

CPU, TOKENS, LAYERS = torch.device("cpu"), 201, 6
SIZE = [f"model.{key}" for key in (f"layers={LAYERS}", "hidden=32", "heads=4", "kv_heads=2", "ffn=96", "vocab=50")]


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_that_fills_the_host_goes_there_whole(mode: str) -> None:
    """Though its tensors begin at places that the planner's bytes do not know."""
    config = load(["recipe=quickstart", "compile=never", f"recompute={mode}", *SIZE])
    model = make_model(config, CPU)
    model.offload = make_offload(config, CPU, int(Costs.of(config).host_bytes(np.int64(TOKENS), PPM)))
    numbers = torch.arange(TOKENS)
    model.offload.begin(1.0, TOKENS)
    model(numbers % 50, numbers, Meeting(whole(TOKENS), None, choose(CPU, torch.float32, 8)), numbers % 50)
    assert model.offload.moved_bytes == model.offload.saved_bytes * (LAYERS - 2) // LAYERS
