"""The load balancing loss through DeepSpeed's ZeRO-1 trains experts as one process does.

It is a sum over each sequence, also over one that lies on two ranks. If these fail, what routes tokens depends on how
a step was parallelised. The reference sees each sequence alone, in float64.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.close import error
from engine.config.schema import Config
from engine.data.inputs import rank_inputs
from engine.data.sequences import SequenceTable
from engine.job import Job
from engine.planner.make import plan_step
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import run_step
from engine.zero.engine import ZeroEngine
from tests.helpers import FakeReader, batch, config, mixtral, rank_context, steps_alone
from tests.world import run_world

WORLD, STEPS, LR, CLIP = 2, 3, 0.5, 0.5
CASES = (("static", "free", 40, 0.0), ("naive", "lockstep", 16, 0.0), ("adaptive", "free", 16, CLIP))

pytestmark = pytest.mark.world


def settings_of(planner: str, mode: str, capacity: int, clip: float, weight: float = 0.5) -> Config:
    """Load a config with a load balancing loss, and SGD with momentum: AdamW would hide a wrong gradient scale."""
    balance = ["balance.by=loss", f"balance.loss_weight={weight}", "balance.z_weight=0.1"]
    experts = ["dtype=fp32", "model.family=mixtral", "model.experts=5", "model.top_k=2", f"optimizer.clip_norm={clip}"]
    return config(WORLD, capacity, planner, f"planner.mode={mode}", *experts, *balance)


def steps(settings: Config) -> list[tuple[SequenceTable, FakeReader]]:
    return [batch(WORLD, settings.capacity, step) for step in range(STEPS)]


def on_rank(settings: Config) -> dict[str, Any]:
    """Train on this rank; return the change of the weights, the norms, and the largest ring."""
    model, context = mixtral(settings).float(), rank_context(torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, norms, degree = ZeroEngine(model, build_optimizer(model, settings.optimizer), settings), [], 1
    for table, reader in steps(settings):
        plan = plan_step(table.length, Job(settings).settings)
        backward = partial(engine.backward, step_loss_tokens=int(table.loss_tokens.sum()))
        run_step(plan, engine.forward, backward, partial(rank_inputs, reader, table), context)
        norms.append(engine.step(LR))
        degree = max(degree, int(plan.degrees.max()))
    change = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    return {"change": change, "norms": norms, "degree": degree}


def all_cases() -> list[dict[str, Any]]:
    return [on_rank(settings_of(*case)) for case in CASES]


def in_one_process(settings: Config) -> tuple[dict[str, Tensor], list[float]]:
    return steps_alone(mixtral(settings), settings, steps(settings), LR)


def test_float32_steps_are_those_of_one_process() -> None:
    ranks = run_world(WORLD, all_cases)
    for number, case in enumerate(CASES):
        change, norms = in_one_process(settings_of(*case))
        for rank in ranks:
            assert rank[number]["degree"] == WORLD, "no ring: the test shows too little"
            assert rank[number]["norms"] == pytest.approx(norms, rel=1e-5), case
            for name, expected in change.items():
                assert error(rank[number]["change"][name], expected) < 1e-5, f"{case}, {name}"
        if case[-1]:
            assert min(norms) > 1.2 * CLIP, "clipping did nothing: the test shows too little"


def test_the_balance_loss_is_a_part_of_what_is_compared() -> None:
    (with_it, _), (without, _) = (in_one_process(settings_of(*CASES[0], weight=weight)) for weight in (0.5, 0.0))
    assert all(error(without[name], with_it[name]) > 1e-3 for name in with_it if "router" in name)
    assert any("router" in name for name in with_it)
