"""What `estimate-memory` says of a micro-batch is what one takes: whole steps through DeepSpeed on two ranks.

On a CPU PyTorch's own record of allocations stands in for a GPU's `max_memory_allocated`.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

from engine.config.load import load
from engine.config.schema import Config
from engine.cost.activations import staying_bytes
from engine.cost.model import Costs
from engine.cost.states import element_bytes
from engine.data.slices import micro_batch_slices
from engine.dtypes import DTYPES
from engine.planner.estimate import Estimate, estimate
from engine.planner.loads import micro_loads
from engine.planner.make import PlanSettings, plan_step
from engine.planner.memory import Load
from engine.planner.plan import StepPlan
from engine.trainer.model import make_model, make_offload
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import RankContext, micro_batch_loss, run_step
from engine.zero.engine import ZeroEngine
from tests.allocations import allocated
from tests.test_plan_invariance import rank_context, table_of
from tests.world import run_world
from tests.zero.test_memory import held

WORLD = 2
SIZE = ["layers=8", "hidden=64", "heads=4", "kv_heads=2", "ffn=192", "vocab=258"]
RINGS, WHOLE = [2048] * 2, [1024] * 4  # two micro-batches a rank: gradients are there in the second one
FIRST = [2048]  # one: they are not
FEW = [64] * 4  # of a large model: its states are most of what is held
LARGE = ["capacity=64", "context=64", "model.layers=4", "model.hidden=512", "model.ffn=1024"]
HOST = ["optimizer.on_host=true", "optimizer.name=sgd"]
VOCABULARY = "model.vocab=6000"
WIDE = ["model.hidden=256", "model.ffn=768"]
EXPERTS = ["model.experts=4", "model.top_k=2", "model.hidden=128"]
CASES: dict[str, tuple[list[int], list[str]]] = {
    "rings": (RINGS, []),
    "whole": (WHOLE, []),
    "capacity": ([4096] * 2, ["capacity=2K", "context=4K"]),
    "heads": (RINGS, ["model.kv_heads=4"]),
    "wide": (RINGS, ["model.hidden=128", "model.ffn=256"]),
    "vocabulary": (RINGS, ["model.vocab=3000"]),
    "bf16": (WHOLE, ["dtype=bf16", "model.ffn=320"]),
    "zero-2": (RINGS, ["zero.stage=2"]),
    "zero-3": (RINGS, ["zero.stage=3"]),
    "zero-3 bf16": (RINGS, ["zero.stage=3", "dtype=bf16", "model.ffn=320"]),
    "layer": (RINGS, ["recompute=layer"]),
    "layer whole": (WHOLE, ["recompute=layer"]),
    "keep attention": (RINGS, ["recompute=layer_keep_attention"]),
    "experts": (RINGS, EXPERTS),
    "experts layer": (WHOLE, ["recompute=layer", *EXPERTS]),
    "experts bias": (RINGS, ["balance.by=bias", "recompute=layer_keep_attention", *EXPERTS]),
    "offload": (RINGS, ["offload.ratio=1"]),
    "offload half": (WHOLE, ["offload.ratio=0.5"]),
    "offload layer": (RINGS, ["offload.ratio=1", "recompute=layer"]),
    "offload experts": (RINGS, ["offload.ratio=0.3", *EXPERTS]),
    "offload bf16": (WHOLE, ["offload.ratio=1", "dtype=bf16", *WIDE]),
    "tied": (RINGS, ["model.tied=true"]),
    "tiles": (WHOLE, ["mlp_tile=256", "model.ffn=320"]),
    "few bf16": (FEW, ["dtype=bf16", *LARGE]),
    "few zero-2": (FEW, ["zero.stage=2", *LARGE]),
    "few zero-3": (FEW, ["zero.stage=3", *LARGE]),
    "few host bf16": (FEW, ["dtype=bf16", *HOST, *LARGE]),
    "first": (FIRST, []),
    "first zero-2": (FIRST, ["zero.stage=2", *WIDE]),
    "first zero-3": (FIRST, ["zero.stage=3", *WIDE]),
    "first bf16": (FIRST, ["dtype=bf16", *WIDE]),
    "first layer": (FIRST, ["recompute=layer", *WIDE]),
    "vocabulary bf16": (RINGS, ["dtype=bf16", "recompute=layer", *WIDE, VOCABULARY]),
    "vocabulary zero-2": (RINGS, ["zero.stage=2", "dtype=bf16", "recompute=layer", *WIDE, VOCABULARY]),
    "vocabulary zero-3": (RINGS, ["zero.stage=3", "dtype=bf16", "recompute=layer", *WIDE, VOCABULARY]),
    "vocabulary tied": (RINGS, ["recompute=layer", "model.tied=true", *WIDE, VOCABULARY]),
    "first host": (FIRST, ["optimizer.on_host=true", "optimizer.name=sgd", *WIDE]),
    "first host zero-2 bf16": (
        FIRST,
        ["optimizer.on_host=true", "optimizer.name=sgd", "zero.stage=2", "dtype=bf16", *WIDE],
    ),
    "host": (RINGS, ["optimizer.on_host=true", "optimizer.name=sgd", "zero.stage=2"]),
}


class Found(NamedTuple):
    """Of a rank: what a micro-batch's forward pass leaves, and the most that a step holds; each with its estimate."""

    saved: int
    saved_estimate: int
    peak: int
    peak_estimate: int


def settings_of(keys: list[str]) -> Config:
    size = [f"model.{key}" for key in SIZE]
    return load(["recipe=quickstart", "capacity=1K", "offload.ratio=0", "compile=never", *size, *keys])


def planned(lengths: list[int], config: Config) -> StepPlan:
    """Return the plan of these lengths with the config's ratio for each micro-batch, needed or not."""
    settings = PlanSettings.of(config)
    plan = plan_step(table_of(lengths, seed=3)[0].length, settings.without_offload())
    plan.offload[:] = settings.offload
    return plan


def measured(cases: list[tuple[list[int], list[str]]]) -> list[Found]:
    return [one(lengths, settings_of(keys)) for lengths, keys in cases]


def one(lengths: list[int], config: Config) -> Found:
    before, plan = held(), planned(lengths, config)
    model = make_model(config, torch.device("cpu"))
    model.offload = make_offload(config, torch.device("cpu"), 1 << 32) if plan.offload.any() else None
    shared = rank_context(DTYPES[config.dtype])
    context = RankContext(shared.rank, shared.device, shared.comm, shared.kernel, model.offload)
    engine = ZeroEngine(model, build_optimizer(model, config.optimizer), config)
    table, reader = table_of(lengths, seed=3)
    slicer = partial(micro_batch_slices, reader, table)
    loss_tokens = int(table.loss_tokens.sum())

    def backward(loss_sum: torch.Tensor) -> None:
        engine.backward(loss_sum, loss_tokens)
        time.sleep(0.02)  # gloo's threads let go of what they sent, as in `held`

    def step() -> None:
        run_step(plan, engine.forward, backward, slicer, context)
        engine.step(1e-3)

    def forward() -> torch.Tensor:
        *_, micro = plan.of_rank(context.rank)
        slices = slicer(micro)
        if context.offload is not None:
            context.offload.begin(micro.offload, len(slices.tokens))
        return micro_batch_loss(engine.module, micro, slices, context)

    step()  # optimizer states, buffers and the arena are there
    arena = model.offload.arena.size if model.offload else 0
    always = held() - before - arena
    peak = always + allocated(step).peak
    with patch("engine.cost.states._unwritten", lambda config: False):  # allocated is allocated here, written or not
        counted = estimated(config, plan, context.rank)
    head = config.model.hidden * config.model.vocab * element_bytes(config.dtype)[1]
    saved = 0 if config.zero.stage == 3 else allocated(forward).left - head  # stage 3 gathers weights meanwhile
    stays = staying_bytes(config.model, config.dtype) * counted.load.tokens
    expected = counted.items["activations"] - counted.working_set + stays
    states_away = Costs.of(config).host_fixed_bytes  # a CPU's tensors are all in one memory
    return Found(saved, expected if saved else 0, peak, counted.peak - counted.items["other"] + states_away)


def estimated(config: Config, plan: StepPlan, rank: int) -> Estimate:
    """Return the estimate of the last micro-batch of a rank."""
    tokens, buffers = micro_loads(plan)
    last = int(plan.micro_start[rank + 1]) - 1
    first = last == int(plan.micro_start[rank])
    load = Load(int(tokens[last]), int(buffers[last]), int(plan.offload[last]), first)
    return estimate(config, PlanSettings.of(config), load)


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    ranks = run_world(WORLD, measured, list(CASES.values()))
    return {name: [rank[number] for rank in ranks] for number, name in enumerate(CASES)}


@pytest.mark.world
@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_and_the_most_that_is_held(found: dict[str, list[Any]], name: str) -> None:
    for rank in found[name]:
        assert rank.saved == pytest.approx(rank.saved_estimate, rel=0.02)
        assert rank.peak == pytest.approx(rank.peak_estimate, rel=0.05)


def test_rings_and_micro_batches_are_what_the_cases_say() -> None:
    for name, (lengths, keys) in CASES.items():
        config = settings_of(keys)
        plan = planned(lengths, config)
        assert (plan.degrees == lengths[0] // config.capacity).all(), name
        assert plan.micro_batches == sum(lengths) // config.capacity == (1 if lengths == FIRST else 2) * WORLD, name
