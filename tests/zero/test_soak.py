"""ZeRO-3 over many steps of random plans, with rings of any size: no hang, no growth of memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.data.inputs import rank_inputs
from engine.job import Job
from engine.planner.make import plan_step
from engine.trainer.model import make_model, make_offload
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import run_step
from engine.zero.engine import ZeroEngine
from tests.helpers import config, rank_context, table_of
from tests.world import run_world

WORLD, CAPACITY = 3, 32
PLANNERS = ("static", "naive", "balanced", "adaptive")

pytestmark = pytest.mark.world


def resident() -> int:
    """Read the resident bytes of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) * 1024


def soak(steps: int, seed: int) -> tuple[list[float], list[int], set[int]]:
    """Train; return the norm and the resident bytes of each step, and the degrees of all plans."""
    memory = ["zero.stage=3", "recompute=layer_keep_attention", "model.layers=4"]
    settings = {planner: config(WORLD, CAPACITY, planner, *memory) for planner in PLANNERS}
    offload = make_offload(settings["naive"], torch.device("cpu"), 1 << 32)
    model, shared = make_model(settings["naive"], torch.device("cpu"), offload=offload), rank_context(torch.float32)
    context = replace(shared, offload=offload)
    engine = ZeroEngine(model, build_optimizer(model, settings["naive"].optimizer), settings["naive"])
    random, norms, bytes_, degrees = np.random.default_rng(seed), [], [], set()
    for step in range(steps):
        lengths = random.integers(1, random.choice([4, CAPACITY, WORLD * CAPACITY]) + 1, random.integers(1, 8))
        table, reader = table_of(lengths.tolist(), seed=step)
        plan = plan_step(table.length, Job(settings[PLANNERS[random.integers(4)]]).settings)
        plan.offload[:] = random.integers(0, 3) * 500_000
        backward = partial(engine.backward, step_loss_tokens=int(table.loss_tokens.sum()))
        run_step(plan, engine.forward, backward, partial(rank_inputs, reader, table), context)
        norms.append(engine.step(1e-3))
        bytes_.append(resident())
        degrees |= set(plan.degrees.tolist())
    return norms, bytes_, degrees


def test_some_steps() -> None:
    ranks = run_world(WORLD, soak, 12, 1)  # a seed with all ratios of offload in several steps
    assert len({tuple(norms) for norms, _, _ in ranks}) == 1 and np.isfinite(ranks[0][0]).all()
    assert ranks[0][2] >= {1, 2, 3}


@pytest.mark.slow
def test_two_hundred_steps_and_no_growth_after_the_twentieth() -> None:
    for norms, bytes_, degrees in run_world(WORLD, soak, 200, 7):
        assert np.isfinite(norms).all() and degrees >= {1, 2, 3}
        assert max(bytes_[20:]) <= 1.02 * bytes_[20], (bytes_[20], max(bytes_[20:]))
