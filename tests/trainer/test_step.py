"""A step keeps the device busy: it reads ahead, and nothing in it waits for the device.

The stand-in for a GPU is PyTorch's meta device: its tensors have no values, so `.item()`, `.tolist()`, `float()`,
`.cpu()` and comparisons raise there, and copies to it are counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.attention.buffers import Buffers
from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.control import progress
from engine.data.inputs import RankInputs, rank_inputs
from engine.errors import DataError
from engine.job import Job
from engine.models.build import build_model
from engine.models.common.initialise import initialise
from engine.models.common.loss import token_loss
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import MicroBatch, StepPlan
from engine.trainer.step import RankContext, evaluate, run_step, to_device
from tests.copies import Copy, recorded_copies
from tests.helpers import batch, config

CPU, META = torch.device("cpu"), torch.device("meta")
# Operators with which the host waits for the device, and those allowed in a step, with the reason. None is.
WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::is_nonzero",
    "aten::equal",
    "aten::_to_copy",
    "aten::copy_",
}
ALLOWED: dict[str, str] = {}


class Silent:
    """Ring traffic that moves nothing: values do not matter on the stand-in."""

    def __init__(self) -> None:
        self.buffers, self.rounds = Buffers(), 0

    def post(self, exchanges: Any) -> Any:
        self.rounds += 1
        return SimpleNamespace(wait=lambda: None)


class Waiting(TorchDispatchMode):
    """Counts operators with which the host waits, in all threads that enter it: reads, and copies between devices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = {x.device for x in (*args, result) if isinstance(x, Tensor)}
        copies = func.name() in ("aten::_to_copy", "aten::copy_")
        if func.name() in WAITS and not (copies and len(devices) == 1):
            self.found.append(func.name())
        return result


def on_stand_in(spoil: Callable[[Tensor], Any] = lambda loss: None, rank: int = 0) -> tuple[list[str], Silent]:
    """Run a rank's step of rings and whole sequences; return what waited, and the traffic. `spoil` gets each loss."""
    settings = config(2, 16, "balanced")
    model, (table, reader) = build_model(settings).to(META), batch(2, 16)
    plan, comm = plan_step(table.length, Job(settings).settings), Silent()
    context = RankContext(rank, META, comm, choose(CPU, torch.float32, 8, prefer="reference"))  # type: ignore[arg-type]
    read_inputs = partial(rank_inputs, reader, table)

    def forward(tokens: Tensor, positions: Tensor, labels: Tensor, attention: AttentionContext) -> Tensor:
        return token_loss(
            model(tokens, positions, attention=attention), labels
        )  # fused losses test themselves first, on values

    def backward(loss: Tensor) -> None:
        spoil(loss)
        loss.backward()

    with Waiting() as waiting:
        loss, times = run_step(plan, forward, backward, read_inputs, context)
    assert loss.device == META and loss.dtype == torch.float64
    assert len(times.marks) == len(list(plan.of_rank(rank))) > 2
    return waiting.found, comm


def test_nothing_in_a_step_waits_for_the_device() -> None:
    found, comm = on_stand_in()
    assert set(found) == set(ALLOWED)
    assert comm.rounds, "no ring: the test shows too little"


@pytest.mark.parametrize(
    "spoil", [Tensor.item, Tensor.cpu, Tensor.tolist, float, bool, lambda loss: loss.detach().to("cpu")]
)
def test_the_stand_in_notices_a_wait(spoil: Callable[[Tensor], Any]) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"meta"):
        on_stand_in(spoil)


def test_the_stand_in_notices_a_copy_from_the_host() -> None:
    found, _ = on_stand_in(lambda loss: loss.detach().copy_(torch.zeros(())))
    assert "aten::copy_" in found


def setup(read_inputs: Callable[[MicroBatch], RankInputs] | None = None) -> tuple[StepPlan, Any, Any, RankContext]:
    """One rank without rings on a CPU."""
    settings = config(1, 40, "balanced")
    model, (table, reader) = build_model(settings), batch(1, 40)
    initialise(model, 3)
    plan = plan_step(table.length, Job(settings).settings)
    context = RankContext(0, CPU, Silent(), choose(CPU, torch.float32, 8))  # type: ignore[arg-type]
    return plan, model, read_inputs or partial(rank_inputs, reader, table), context


def test_the_next_inputs_are_read_while_a_micro_batch_computes() -> None:
    plan, model, read_inputs, context = setup()
    last, read = list(plan.of_rank(0))[-1].index, {micro.index: threading.Event() for micro in plan.of_rank(0)}
    computed: list[int] = []

    def reading(micro: MicroBatch) -> RankInputs:
        read[micro.index].set()
        return read_inputs(micro)

    def backward(loss: Tensor) -> None:
        done = len(computed)
        assert done == last or read[done + 1].wait(20), "the next one is not read before this one is done"
        assert not any(read[ahead].is_set() for ahead in range(done + 2, last + 1)), "only one is held ahead"
        computed.append(done)

    _, times = run_step(plan, model, backward, reading, context)
    assert len(computed) == last + 1 > 2
    assert [number for number, _, _ in times.spans()] == computed
    ends = [(start, stop) for _, start, stop in times.spans()]
    assert ends == sorted(ends) and ends[0][0] == 0 and times.data_wait_s >= 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_reports_its_passes_by_its_own_numbers(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers over all ranks would make rank 0 the one that is furthest behind, wherever it is."""
    reported = list[tuple[str, int]]()
    monkeypatch.setattr(progress, "report", lambda phase, part=0: reported.append((phase, part)))
    on_stand_in(rank=rank)
    passes = [number for phase, number in reported if phase in ("forward", "backward")]
    assert passes == list(range(len(passes))) and len(passes) > 4
    expected = [("data", 0)]
    for number in range(0, len(passes), 2):
        expected += [("forward", number), ("backward", number + 1), ("data", number + 2)]
    assert reported == expected


@pytest.mark.parametrize("marked", [True, False])
def test_reductions_begin_within_the_last_backward_pass_if_the_plan_says_so(marked: bool) -> None:
    plan, model, read_inputs, context = setup()
    called: list[str] = []
    context = replace(context, reduce_from_here=lambda: called.append("reduce"))
    plan = replace(plan, overlap=np.array([int(marked)]))
    run_step(plan, model, lambda loss: called.append("backward"), read_inputs, context)
    passes = ["backward"] * plan.micro_batches
    assert called == ([*passes[1:], "reduce", "backward"] if marked else passes) and len(passes) > 2


def test_losses_add_up_in_float64() -> None:
    plan, model, read_inputs, context = setup()
    losses: list[float] = []
    loss, _ = run_step(plan, model, lambda one: losses.append(one.item()), read_inputs, context)
    assert loss.item() == sum(losses)
    assert evaluate(plan, model, read_inputs, context).item() == pytest.approx(sum(losses), rel=1e-6)


def test_an_error_while_reading_ends_the_step() -> None:
    def gone(micro: MicroBatch) -> RankInputs:
        raise DataError("gone", key="a.txt")

    with pytest.raises(DataError, match="gone"):
        run_step(*setup()[:2], Tensor.backward, gone, setup()[3])


def test_inputs_are_pinned_and_their_copies_do_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _, read_inputs, _ = setup()
    inputs = read_inputs(next(plan.of_rank(0)))
    copies = recorded_copies(monkeypatch)
    to_device(inputs, torch.device("cuda"))
    parts = [part.tolist() for part in (inputs.tokens, inputs.labels, inputs.positions)]
    assert copies == [Copy(part, pinned=True, non_blocking=True) for part in parts]


@pytest.mark.gpu
def test_inputs_are_copied_without_a_wait() -> None:
    plan, _, read_inputs, _ = setup()
    read = read_inputs(next(plan.of_rank(0)))
    to_device(read, torch.device("cuda"))  # pinned memory is allocated
    torch.cuda.set_sync_debug_mode("error")
    try:
        copied = to_device(read, torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert copied.tokens.tolist() == read.tokens.tolist()
