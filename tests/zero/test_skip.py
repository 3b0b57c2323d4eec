"""A step whose loss or gradients are not finite changes nothing, on any rank, and leaves nothing behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.config.load import load
from engine.models.common.attention import LocalAttention
from engine.models.common.initialise import initialise
from engine.models.decoder import Decoder
from engine.trainer.optimizer import build_optimizer
from engine.zero.engine import ZeroEngine
from engine.zero.shards import sharded, stored
from tests.world import run_world
from tests.zero.saving import save

pytestmark = pytest.mark.world

Spoil = Callable[[Tensor], Tensor]


def gradients(loss: Tensor) -> Tensor:
    return loss * math.nan


def loss_alone(loss: Tensor) -> Tensor:
    """Gradients stay finite."""
    return loss + math.inf


# ZeRO stage, dtype, and whether optimizer states are on the host
PLACES = [*((stage, dtype, False) for stage, dtype in product((1, 2, 3), ("fp32", "bf16"))), (2, "fp32", True)]


def engine_of(stage: int, dtype: str, on_host: bool) -> ZeroEngine:
    shape = ["model.layers=1", "model.hidden=32", "model.ffn=48", "optimizer.clip_norm=0.1"]
    optimizer = ["optimizer=adamw", f"optimizer.on_host={on_host}"]
    config = load(["recipe=quickstart", *shape, f"dtype={dtype}", f"zero.stage={stage}", *optimizer])
    with sharded(config):
        model = Decoder(config.model).to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    initialise(model, 0, torch.device("cpu"), stored)
    return ZeroEngine(model, build_optimizer(model, config.optimizer), config)


def steps(engine: ZeroEngine, spoils: list[Spoil | None]) -> tuple[list[float], list[Tensor]]:
    """Train steps of two micro-batches, whose losses on rank 1 are spoilt; return the norms, and the stored weights."""
    positions, norms = torch.arange(5), []
    tokens = positions + dist.get_rank()
    for number, spoil in enumerate(spoils):
        for micro in range(2):
            loss = engine.forward(tokens, positions, tokens, LocalAttention(positions))
            if spoil is not None and dist.get_rank() == 1 and micro == number % 2:
                loss = spoil(loss)
            engine.backward(loss, 20)
        norms.append(engine.step(1e-2))
    return norms, [stored(p).values.detach().clone() for p in engine.module.parameters()]


def on_rank(folder: Path) -> list[tuple[object, list[float], bool, bool]]:
    """Train with and without spoilt steps before and after; the run with them is also resumed after the last."""
    found = []
    for number, place in enumerate(PLACES):
        expected = steps(engine_of(*place), [None, None])[1]
        engine = engine_of(*place)
        norms, _ = steps(engine, [gradients, None, loss_alone])  # the first step of all, too
        save(engine, folder / str(number))
        again = engine_of(*place)
        again.load(folder / str(number))
        same = [
            all(torch.equal(one, other) for one, other in zip(steps(one_of, [None])[1], expected, strict=True))
            for one_of in (engine, again)
        ]
        found.append((place, norms, *same))
    return found


def test_skipped_steps_change_nothing_and_leave_nothing(tmp_path: Path) -> None:
    """Weights after it are equal to the last bit, also where the first of all steps is skipped."""
    for rank in run_world(2, on_rank, tmp_path):
        for case, norms, goes_on, resumes in rank:
            assert [math.isfinite(norm) for norm in norms] == [False, True, False], case
            assert (goes_on, resumes) == (True, True), case
