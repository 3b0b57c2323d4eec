"""Plan invariance with all memory settings: ZeRO stages, offload ratios, recompute modes, tiles of SwiGLU and experts,
states on the host; and with all planners.

Compares float32 training through DeepSpeed with one process in float64 that runs each sequence by itself: gradient
norms, and the change of the parameters over steps of SGD with momentum. Steps are uneven: rings of one to all ranks,
then a step of a single sequence, in which all ranks but one are idle. Error of a tensor = max|a - b| / max|b|.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config.schema import Config
from engine.data.inputs import rank_inputs
from engine.data.sequences import SequenceTable
from engine.job import Job
from engine.planner.make import plan_step
from engine.trainer.model import make_offload
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import run_step
from tests.covering import Case, every, pairwise
from tests.helpers import FakeReader, batch, change_error, config, family, model_of, rank_context, steps_alone, table_of
from tests.world import run_world

FACTORS = {
    "stage": (1, 2, 3),
    "planner": ("static", "naive", "balanced", "adaptive"),
    "offload": (0.0, 0.5, 1.0),
    "recompute": ("none", "layer", "layer_keep_attention"),
    "experts": (1, 5),
}
ALSO = {"tile": (0, 3), "host": (False, True), "qwen3": (False, True)}  # not among every choice
WORLDS = (2, 3, 4)  # for every choice
FEW = (2, 3)  # for any two choices together
CAPACITY, LR = 16, 2.0

pytestmark = pytest.mark.world


def settings_of(world: int, case: Case) -> Config:
    balance = ["balance.loss_weight=0.5", "balance.z_weight=0.1"] if case["experts"] > 1 else []
    memory = [f"zero.stage={case['stage']}", f"recompute={case['recompute']}", f"model.experts={case['experts']}"]
    memory += family(case["experts"] > 1, case.get("qwen3", False))
    size = ["model.layers=4", f"model.top_k={min(2, case['experts'])}", "optimizer.clip_norm=0.7", "offload.ratio=0"]
    host = [f"optimizer.on_host={case.get('host', False)}", f"mlp_tile={case.get('tile', 0)}"]
    away = [f"zero.weights_on_host={case.get('host', False) and case['stage'] == 3}"]
    return config(world, CAPACITY, case["planner"], *memory, *size, *balance, *host, *away)


def steps(world: int) -> list[tuple[SequenceTable, FakeReader]]:
    return [batch(world, CAPACITY), table_of([7], seed=5), batch(world, CAPACITY, 1)]


def on_rank(world: int, case: Case) -> dict[str, Any]:
    """Train some steps; return the change of all parameters, the norms, the degrees, and the bytes offloaded."""
    from engine.zero.engine import ZeroEngine
    from tests.zero.full import masters

    settings = settings_of(world, case)
    start = model_of(settings.model_copy(update={"zero": settings.zero.model_copy(update={"stage": 1})}))
    before = {name: parameter.detach().clone() for name, parameter in start.named_parameters()}
    offload = make_offload(settings, torch.device("cpu"), 1 << 32)
    model, shared = model_of(settings, offload), rank_context(torch.float32)
    context = replace(shared, offload=offload)
    engine, norms, degrees = ZeroEngine(model, build_optimizer(model, settings.optimizer), settings), [], set()
    for table, reader in steps(world):
        plan = plan_step(table.length, Job(settings).settings)
        plan.offload[:] = round(case["offload"] * 1_000_000)
        backward = partial(engine.backward, step_loss_tokens=int(table.loss_tokens.sum()))
        run_step(plan, engine.forward, backward, partial(rank_inputs, reader, table), context)
        norms.append(engine.step(LR))
        degrees |= set(plan.degrees.tolist())
    change = {name: master - before[name] for name, master in masters(engine).items()}
    return {"change": change, "norms": norms, "degrees": degrees, "moved": (offload.moved_bytes, offload.saved_bytes)}


def on_rank_all(world: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [on_rank(world, case) for case in cases]


@cache
def in_one_process(world: int, experts: int, qwen3: bool) -> tuple[dict[str, Tensor], list[float]]:
    case: Case = {"stage": 1, "planner": "naive", "recompute": "none", "experts": experts, "qwen3": qwen3}
    settings = settings_of(world, case)
    return steps_alone(model_of(settings).double(), settings, steps(world), LR)


def compare(world: int, cases: list[Case]) -> list[tuple[Case, float]]:
    """Check each case on all ranks; return the largest error of each."""
    ranks, errors = run_world(world, on_rank_all, world, cases), []
    for number, case in enumerate(cases):
        change, norms = in_one_process(world, case["experts"], case.get("qwen3", False))
        for rank in (rank[number] for rank in ranks):
            assert rank["norms"] == pytest.approx(norms, rel=1e-5), case
            updates = len(norms)
            off = {name: change_error(name, rank["change"][name], one, updates) for name, one in change.items()}
            assert max(off.values()) < 1e-5, (case, max(off, key=lambda name: off[name]))
            moved, saved = rank["moved"]
            most = (
                case["offload"] * saved / 2
            )  # two of four layers stay; micro-batches of one token are too small to offload
            assert 0.4 * most <= moved <= most, case
        errors.append((case, max(off.values())))
        assert max(ranks[0][number]["degrees"]) == world, "no sequence needed all ranks: the test shows too little"
    return errors


@pytest.mark.parametrize("world", FEW)
def test_any_two_choices_together(world: int) -> None:
    """A covering set of pairs, divided over the worlds."""
    cases = pairwise(FACTORS | ALSO | {"world": FEW})
    compare(world, [case for case in cases if case["world"] == world])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", WORLDS)
def test_every_choice(world: int) -> None:
    cases = every(FACTORS)
    for first in range(0, len(cases), 12):
        for case, off in compare(world, cases[first : first + 12]):
            print(world, *case.values(), f"{off:.1e}", flush=True)


def test_the_covering_set_has_every_pair() -> None:
    cases = pairwise(FACTORS)
    assert len(cases) < 20 < len(every(FACTORS))
    for one in FACTORS:
        for other in FACTORS:
            met = {(case[one], case[other]) for case in cases}
            assert len(met) == (len(FACTORS[one]) * len(FACTORS[other]) if one != other else len(FACTORS[one]))


def test_uneven_steps_are_uneven() -> None:
    settings = settings_of(3, {"stage": 1, "planner": "naive", "recompute": "none", "experts": 1})
    plan = plan_step(np.array([7]), Job(settings).settings)
    assert [sum(len(micro.shards) for micro in plan.of_rank(rank)) for rank in range(3)].count(0) == 2
