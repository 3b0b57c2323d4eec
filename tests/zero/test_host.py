"""Optimizer states and weights on the host: the states are updated as AdamW in one process updates them.

With a large eps AdamW is nearly SGD with momentum and shows a wrong scale of the gradients; tests/
test_plan_invariance_memory.py has SGD itself. The reference sees each sequence alone, in float64.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.close import error
from engine.config.schema import Config
from engine.data.inputs import rank_inputs
from engine.family.families import parameters_of
from engine.job import Job
from engine.planner.make import plan_step
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import run_step
from engine.zero.engine import ZeroEngine
from engine.zero.states import master_weights
from tests.helpers import batch, config, model_of, rank_context, steps_alone, table_of
from tests.world import run_world
from tests.zero.full import masters
from tests.zero.saving import save

WORLD, CAPACITY, LR = 3, 16, 2.0
PLACES = {  # the stage, and what is on the host: optimizer states, weights
    "stage 1": (1, True, False),
    "stage 2": (2, True, False),
    "stage 3": (3, True, False),
    "stage 3, weights": (3, False, True),
    "stage 3, both": (3, True, True),
}
PLACES_OF = {"fp32": ("stage 1", "stage 3", "stage 3, weights"), "bf16": ("stage 1", "stage 2", "stage 3, both")}

pytestmark = pytest.mark.world


def settings_of(place: str, dtype: str, world: int = WORLD) -> Config:
    stage, optimizer, weights = PLACES[place]
    zero = [f"zero.stage={stage}", f"optimizer.on_host={optimizer}", f"zero.weights_on_host={weights}"]
    adamw = ["optimizer.name=adamw", "optimizer.eps=1", "optimizer.betas=[0.9,0.95]", "optimizer.weight_decay=0.1"]
    return config(world, WORLD * CAPACITY // world, "naive", f"dtype={dtype}", *zero, *adamw, "optimizer.clip_norm=0.7")


def steps() -> list[Any]:
    """Three steps; the second has a single sequence, so two of three ranks have none."""
    return [batch(WORLD, CAPACITY), table_of([7], seed=5), batch(WORLD, CAPACITY, 1)]


def train(engine: ZeroEngine, settings: Config, batches: list[Any]) -> tuple[list[float], set[int]]:
    """Train; return each step's norm, and the ranks' numbers of micro-batches in the first step."""
    context, norms, counts = rank_context(torch.bfloat16 if settings.dtype == "bf16" else torch.float32), [], set()
    for table, reader in batches:
        plan = plan_step(table.length, Job(settings).settings)
        backward = partial(engine.backward, step_loss_tokens=int(table.loss_tokens.sum()))
        run_step(plan, engine.forward, backward, partial(rank_inputs, reader, table), context)
        norms.append(engine.step(LR))
        counts |= {sum(1 for _ in plan.of_rank(rank)) for rank in range(plan.ranks)} if len(norms) == 1 else set()
    return norms, counts


def engine_of(settings: Config) -> ZeroEngine:
    model = model_of(settings)
    return ZeroEngine(model, build_optimizer(model, settings.optimizer), settings)


def on_rank(dtype: str, folder: Path) -> dict[str, dict[str, Any]]:
    return {place: trained(settings_of(place, dtype), folder / place) for place in PLACES_OF[dtype]}


def trained(settings: Config, folder: Path) -> dict[str, Any]:
    """Train three steps; then load a checkpoint of the second into another engine and train the third again."""
    engine = engine_of(settings)
    norms, counts = train(engine, settings, steps()[:2])
    save(engine, folder)
    saved = masters(engine)
    norms += train(engine, settings, steps()[2:])[0]
    again = engine_of(settings)
    again.load(folder)
    train(again, settings, steps()[2:])
    one, other = masters(engine), masters(again)
    same = all(torch.equal(one[name], other[name]) for name in one)
    return {"weights": one, "saved": saved, "norms": norms, "counts": counts, "same": same}


@cache
def alone(dtype: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Train in one process; return the weights before, their change, and the norms."""
    settings = settings_of("stage 1", dtype)
    settings = settings.model_copy(update={"optimizer": settings.optimizer.model_copy(update={"on_host": False})})
    model = model_of(settings)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model = model.bfloat16().double() if dtype == "bf16" else model.double()
    return before, *steps_alone(model, settings, steps(), LR)


def assert_written(checkpoint: Path, saved: dict[str, Tensor]) -> None:
    """Check that an export would read the saved masters."""
    written = master_weights(checkpoint, parameters_of(settings_of("stage 1", "fp32").model))
    assert written.keys() == saved.keys()
    assert all(torch.equal(written[name](), saved[name]) for name in saved)


def test_float32_steps_are_those_of_one_process(tmp_path: Path) -> None:
    before, change, norms = alone("fp32")
    for rank in run_world(WORLD, on_rank, "fp32", tmp_path, timeout_s=500):
        for place, found in rank.items():
            assert found["norms"] == pytest.approx(norms, rel=1e-5), place
            for name, expected in change.items():
                assert error(found["weights"][name] - before[name], expected) < 1e-5, (place, name)
            assert found["same"], f"{place}: a restart changes the result"
            assert_written(tmp_path / place, found["saved"])
            assert (len(found["counts"]) > 1) == place.startswith("stage 1"), "the counts are uneven in free mode"
    assert min(norms) > 0.7 * 1.2, "clipping did nothing: the test shows too little"


def test_bf16_steps_are_as_near_to_float64_as_one_process_without_the_host(tmp_path: Path) -> None:
    """RMS difference at most twice that of one process without the host."""
    _, change, norms = alone("bf16")
    before = {name: tensor.bfloat16().float() for name, tensor in alone("bf16")[0].items()}

    def rms(weights: dict[str, Tensor]) -> float:
        off = [(weights[name] - before[name]).double() - expected for name, expected in change.items()]
        return float(torch.cat([one.flatten() for one in off]).pow(2).mean().sqrt())

    (here,) = run_world(1, without_the_host, tmp_path / "without")
    assert here["same"], "a restart changes the result"
    for rank in run_world(WORLD, on_rank, "bf16", tmp_path, timeout_s=500):
        for place, found in rank.items():
            assert found["same"], place
            assert_written(tmp_path / place, found["saved"])
            assert rms(found["weights"]) <= 2 * rms(here["weights"]), place
            assert found["norms"] == pytest.approx(norms, rel=2e-2), place


def without_the_host(folder: Path) -> dict[str, Any]:
    settings = settings_of("stage 1", "bf16", world=1)
    settings = settings.model_copy(update={"optimizer": settings.optimizer.model_copy(update={"on_host": False})})
    return trained(settings, folder)
