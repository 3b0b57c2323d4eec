"""How often DeepSpeed reads a value of the device: what docs/gpu.md lists as the waits of a step.

A run on a CPU shows them too: each is the operator that turns a tensor of one element into a Python number.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config.load import load
from engine.models.common.attention import LocalAttention
from engine.models.common.initialise import initialise
from engine.models.llama.model import Llama
from engine.trainer.optimizer import build_optimizer
from engine.zero.engine import ZeroEngine
from engine.zero.shards import sharded, stored
from tests.world import run_world

pytestmark = pytest.mark.world

CASES = list(product((1, 2, 3), ("fp32", "bf16")))


class Reads(TorchDispatchMode):
    """Counts the operators that read a value."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name().startswith(("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"))
        return func(*args, **(kwargs or {}))


def reads(stage: int, dtype: str) -> list[tuple[int, int]]:
    """On a rank: the reads in two micro-batches and in the update, for each of four steps."""
    shape = ["model.layers=2", "model.hidden=32", "model.ffn=48"]
    config = load(["recipe=quickstart", *shape, f"dtype={dtype}", f"zero.stage={stage}", "optimizer.clip_norm=0.1"])
    device, tokens, found = torch.device("cpu"), torch.arange(5), []
    with sharded(config):
        model = Llama(config.model).to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    initialise(model, 0, device, stored)
    engine = ZeroEngine(model, build_optimizer(model, config.optimizer), config)
    attention = LocalAttention(tokens)
    for _ in range(4):
        with Reads() as micro_batches:
            for _ in range(2):
                engine.backward(engine.forward(tokens, tokens, tokens, attention), 10)
        with Reads() as update:
            norm = engine.step(1e-3)
        assert norm > 0.1, "clipped"
        found.append((micro_batches.count, update.count))
    return found


def all_reads() -> list[list[tuple[int, int]]]:
    return [reads(*case) for case in CASES]


def test_deepspeed_reads_values_in_the_update_alone() -> None:
    """ZeRO-3 compares its order of gathers between ranks once, when it has recorded it in the first step."""
    (found, _) = run_world(2, all_reads)
    most = {1: 4, 2: 5, 3: 2}  # all of the norm or of its finiteness, one after the other, and ours
    for (stage, dtype), steps in zip(CASES, found, strict=True):
        assert [micro for micro, _ in steps[2:]] == [0, 0], (stage, dtype, steps)
        assert max(update for _, update in steps) <= most[stage], (stage, dtype, steps)
        print(f"stage {stage}, {dtype}: {steps}")
