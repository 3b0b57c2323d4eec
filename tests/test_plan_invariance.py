"""Plan invariance: one global batch gives the same loss and gradients under every plan (docs/design.md).

If these fail, what a run learns depends on how it was parallelised. The reference is a plain model in one process that
runs each sequence by itself, without rings. Error of a tensor = max|a - b| / max|b|.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.close import error
from engine.config.schema import Config
from engine.data.inputs import rank_inputs
from engine.data.sequences import SequenceTable
from engine.job import Job
from engine.models.common.loss import token_loss
from engine.models.decoder import Decoder
from engine.planner.make import plan_step
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import run_step
from tests.covering import Case, every, pairwise
from tests.helpers import (
    Batch,
    FakeReader,
    batch,
    config,
    deepspeed_run,
    family,
    llama,
    rank_context,
    table_of,
)
from tests.world import run_world

FACTORS: dict[str, list[Any]] = {
    "world": [1, 2, 3, 4],
    "capacity": [16, 40],
    "planner": ["static", "naive", "balanced"],
    "mode": ["free", "lockstep"],
}
# For gradients; steps of Qwen3 are in the tests of memory and of meshes.
QWEN3: dict[str, list[Any]] = {"qwen3": [False, True]}
CLIPS: dict[str, list[Any]] = {"clip": [0, 0.4]}
LR, STEPS = 2.0, 2  # with momentum the second step depends on the first

pytestmark = pytest.mark.world


def reference_loss(model: Decoder, table: SequenceTable, reader: FakeReader) -> Tensor:
    """Return the mean loss over all tokens, one unsplit sequence at a time, with PyTorch's own attention."""
    losses = []
    for document, length in zip(table.document.tolist(), table.length.tolist(), strict=True):
        tokens = torch.from_numpy(reader.tokens(0, 0, document, 0, length + 1))
        losses.append(token_loss(model(tokens[:-1], torch.arange(length)), tokens[1:]))
    return torch.stack(losses).sum() / int(table.loss_tokens.sum())


def settings_of(case: Case, *more: str) -> Config:
    more = (f"planner.mode={case['mode']}", *family(False, case.get("qwen3", False)), *more)
    return config(case["world"], case["capacity"], case["planner"], *more)


def gradients_of(case: Case) -> dict[str, Any]:
    """On one rank: loss sum and gradients of its own micro-batches, in float64."""
    settings, context = settings_of(case), rank_context(torch.float64)
    table, reader = batch(case["world"], case["capacity"])
    plan = plan_step(table.length, Job(settings).settings)
    model = llama(settings, torch.float64)
    loss, _ = run_step(plan, model, Tensor.backward, partial(rank_inputs, reader, table), context)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.item(), "gradients": gradients, "degree": int(plan.degrees.max())}


def covering(factors: dict[str, list[Any]]) -> list[Case]:
    """A covering set, and one for a single rank alone: there plans hardly differ, and a pair of them shows little."""
    return pairwise(factors | {"world": [2, 3, 4]}) + pairwise(factors | {"world": [1]})


def each(function: Callable[[Case], Any], cases: list[Case]) -> list[Any]:
    return [function(case) for case in cases]


def in_worlds(function: Callable[[Case], Any], cases: list[Case]) -> Iterator[tuple[Case, tuple[Any, ...]]]:
    """Run the function on all ranks of each case's world; yield each case with what its ranks got."""
    for size in FACTORS["world"]:
        chosen = [case for case in cases if case["world"] == size]
        ranks = run_world(size, each, function, chosen)
        yield from zip(chosen, zip(*ranks, strict=True), strict=True)


def compare_gradients(cases: list[Case]) -> None:
    degrees: dict[int, int] = {}
    for case, ranks in in_worlds(gradients_of, cases):
        table, reader = batch(case["world"], case["capacity"])
        model = llama(settings_of(case), torch.float64)
        loss = reference_loss(model, table, reader) * int(table.loss_tokens.sum())
        loss.backward()
        assert abs(sum(rank["loss"] for rank in ranks) - loss.item()) < 1e-10 * loss.item(), case
        for parameter, value in model.named_parameters():
            total = sum(rank["gradients"][parameter] for rank in ranks)
            assert error(total, value.grad) < 1e-10, f"{case}, {parameter}"
        degrees[case["world"]] = max(degrees.get(case["world"], 0), ranks[0]["degree"])
    assert degrees == {world: world for world in FACTORS["world"]}, "no sequence needed all ranks: it shows too little"


def test_float64_gradients_of_every_plan_are_those_of_one_process() -> None:
    """A covering set of all factors."""
    compare_gradients(covering(FACTORS | QWEN3))


@pytest.mark.slow
def test_float64_gradients_of_all_combinations() -> None:
    compare_gradients(every(FACTORS | QWEN3))


def plain_run(settings: Config, step_tables: list[Batch]) -> dict[str, Any]:
    """The same steps with plain PyTorch, in float64."""
    model = llama(settings, torch.float32).double()
    if settings.dtype == "bf16":  # DeepSpeed's masters start from the bf16 weights
        model = model.bfloat16().double()
    start = llama(settings, torch.float32)
    before = {name: p.detach().double() for name, p in start.named_parameters()}
    optimizer, norms = build_optimizer(model, settings.optimizer), []
    for group in optimizer.param_groups:
        group["lr"] = LR
    for table, reader in step_tables:
        optimizer.zero_grad()
        reference_loss(model, table, reader).backward()
        limit = settings.optimizer.clip_norm or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
    return {"change": {n: p.detach() - before[n] for n, p in model.named_parameters()}, "norms": norms}


def steps_of(case: Case) -> list[Batch]:
    return [batch(case["world"], case["capacity"], step) for step in range(STEPS)]


def trained(case: Case) -> dict[str, Any]:
    return deepspeed_run(settings_of(case, f"optimizer.clip_norm={case['clip']}"), steps_of(case), LR)


def compare_steps(cases: list[Case]) -> None:
    plain: dict[tuple[Any, ...], dict[str, Any]] = {}
    for case, ranks in in_worlds(trained, cases):
        key = case["world"], case["capacity"], case["clip"]
        if key not in plain:
            plain[key] = plain_run(settings_of(case, f"optimizer.clip_norm={case['clip']}"), steps_of(case))
        expected = plain[key]
        for rank in ranks:
            assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5), case
            for parameter, change in expected["change"].items():
                assert error(rank["change"][parameter], change) < 1e-5, f"{case}, {parameter}"
        if case["clip"]:
            assert min(expected["norms"]) > 1.2 * case["clip"], "clipping did nothing: the test shows too little"


def test_float32_steps_through_deepspeed_are_those_of_one_process() -> None:
    """SGD with momentum, since AdamW would hide a wrong gradient scale; clipping off and on. A covering set."""
    compare_steps(covering(FACTORS | CLIPS))


@pytest.mark.slow
def test_float32_steps_of_all_combinations() -> None:
    compare_steps(every(FACTORS | CLIPS))


def idle_rank_results(world: int) -> dict[str, Any]:
    settings = config(world, 16, "naive", "optimizer.clip_norm=0")
    return deepspeed_run(settings, [table_of([5], seed=1), table_of([16, 3], seed=2)], LR)


def test_a_rank_without_any_work_changes_nothing() -> None:
    world = 3
    settings = config(world, 16, "naive", "optimizer.clip_norm=0")
    expected = plain_run(settings, [table_of([5], seed=1), table_of([16, 3], seed=2)])
    plan = plan_step(np.array([5]), Job(settings).settings)
    assert [sum(len(m.shards) for m in plan.of_rank(rank)) for rank in range(world)].count(0) == 2
    for rank in run_world(world, idle_rank_results, world):
        assert rank["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        for parameter, change in expected["change"].items():
            assert error(rank["change"][parameter], change) < 1e-5, parameter


def bf16_results(ranks: int, capacity: int, linear_dtype: str) -> dict[str, Any]:
    more = ("dtype=bf16", f"linear_dtype={linear_dtype}", "optimizer.clip_norm=0")
    settings = config(ranks, capacity, "balanced", *more)
    return deepspeed_run(settings, [batch(2, 40, step) for step in range(STEPS)], LR)


@pytest.mark.parametrize("linear_dtype", ["same", "fp8"])
def test_bf16_is_as_near_to_float64_as_one_process_in_bf16(linear_dtype: str) -> None:
    """As GPU users run it: RMS difference at most twice that of the one-process run. In FP8 too, where the scales of a
    tensor depend on the tokens that are in a micro-batch together."""
    settings = config(2, 40, "balanced", "dtype=bf16", "optimizer.clip_norm=0")
    exact = plain_run(settings, [batch(2, 40, step) for step in range(STEPS)])["change"]
    one = run_world(1, bf16_results, 1, 80, linear_dtype)[0]["change"]
    two = run_world(2, bf16_results, 2, 40, linear_dtype)[0]
    assert two["degree"] == 2

    def rms(change: dict[str, Tensor]) -> float:
        return float(torch.cat([(change[n].double() - exact[n]).flatten() for n in exact]).pow(2).mean().sqrt())

    assert rms(two["change"]) <= 2 * rms(one)
