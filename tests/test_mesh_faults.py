"""Each fault of tensor and pipeline parallelism that would be silent makes plan invariance fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine.parallel.tensor as tensor_module
import engine.trainer.step as step_module
import engine.zero.engine as engine_module
from engine.models.split import dim_of
from engine.parallel.axes import Axes
from engine.parallel.tensor import TensorParallel
from engine.zero.engine import ZeroEngine
from engine.zero.mpu import ModelParallelUnit, mark, sum_copies
from tests.covering import Case
from tests.helpers import llama, steps_alone
from tests.meshes import LR, WORLD, Groups, batches, compare, gradients_of, through_deepspeed, zero_settings
from tests.world import run_world

pytestmark = pytest.mark.world

MESH = (2, 2)
CASE: Case = {"tp_pp": MESH, "planner": "adaptive", "tied": False, "recompute": "none"}
VARIANT = ("fp32", True, 0.0)


def own_rows(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
    """The gradient of `_Enter` without the sum over devices."""
    rows = ctx.tensor.rows(len(dout))
    padded = torch.nn.functional.pad(dout, (0, 0, 0, rows * ctx.tensor.size - len(dout)))
    return padded[ctx.tensor.rank * rows :][:rows], None, None


def no_sum(self: TensorParallel, x: Tensor) -> Tensor:
    rows = self.rows(len(x))
    return torch.nn.functional.pad(x, (0, 0, 0, rows * self.size - len(x)))[self.rank * rows :][:rows]


def unmasked(self: TensorParallel, tokens: Tensor, weight: Tensor) -> Tensor:
    """The embedding of tokens outside the device's slice is not 0."""
    return self.leave(torch.nn.functional.embedding(tokens % len(weight), weight))


def without_padding(self: TensorParallel, logits: Tensor, labels: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """The rows that pad the vocabulary count in the softmax."""
    self._vocab = self.size * logits.shape[1]
    return LOGITS_LOSS(self, logits, labels, ignore)


def reduced_without(operation: Any) -> Callable[..., None]:
    """An all-reduce that leaves out one kind of operation."""

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op != operation:
            ALL_REDUCE(tensor, op, group)

    return all_reduce


LOGITS_LOSS, ALL_REDUCE = TensorParallel.logits_loss, dist.all_reduce
# Each fault: what is replaced, and by what.
FAULTS: dict[str, tuple[Any, str, Any]] = {
    "gradients of gathered rows are not summed": (tensor_module._Enter, "backward", staticmethod(own_rows)),
    "partial sums are not added": (TensorParallel, "reduce_scatter", no_sum),
    "tokens of other slices are looked up": (TensorParallel, "lookup", unmasked),
    "the padding of the vocabulary counts": (TensorParallel, "logits_loss", without_padding),
    "each slice has its own largest logit": (dist, "all_reduce", reduced_without(dist.ReduceOp.MAX)),
    "sums of the softmax are not added": (dist, "all_reduce", reduced_without(dist.ReduceOp.SUM)),
    "gradients of the next stage are lost": (step_module, "with_gradient", lambda out, gradient: out.sum() * 0),
}


def without_mark(name: str) -> Callable[[nn.Module, Axes, bool], None]:
    def marked(model: nn.Module, axes: Axes, tied: bool) -> None:
        mark(model, axes, tied)
        for parameter in model.parameters():
            if hasattr(parameter, name):
                delattr(parameter, name)

    return marked


def only_tied(model: nn.Module, axes: Axes, tied: bool, bf16: bool) -> None:
    """Sum the tied weight's copies, but not the norms."""
    norms = {name: p.grad.clone() for name, p in model.named_parameters() if dim_of(name) is None}
    sum_copies(model, axes, tied, bf16)
    for name, parameter in model.named_parameters():
        if name in norms:
            parameter.grad = norms[name]


def only_norms(model: nn.Module, axes: Axes, tied: bool, bf16: bool) -> None:
    """Sum the norms, but not the tied weight's copies."""
    sum_copies(model, axes, False, bf16)


def scaled_by_world(self: ZeroEngine, loss_sum: Tensor, step_loss_tokens: int) -> None:
    """The loss is multiplied by the number of devices, not of HDP ranks."""
    hdp = WORLD // (MESH[0] * MESH[1])
    BACKWARD(self, loss_sum * (WORLD // hdp), step_loss_tokens)


BACKWARD = ZeroEngine.backward
ZERO_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "slices are not marked": (engine_module, "mark", without_mark("tensor_model_parallel")),
    "the copy of the tied weight is not marked": (engine_module, "mark", without_mark("ds_pipe_replicated")),
    "norms are not summed over tp": (engine_module, "sum_copies", only_tied),
    "the tied weight is not summed over stages": (engine_module, "sum_copies", only_norms),
    "the norm is that of a stage": (ModelParallelUnit, "get_model_parallel_group", lambda self: self._axes.tp),
    "the loss is scaled by the world": (ZeroEngine, "backward", scaled_by_world),
}


@contextmanager
def planted(fault: tuple[Any, str, Any] | None) -> Iterator[None]:
    """Replace an attribute."""
    if fault is None:
        yield
        return
    owner, name, value = fault
    kept = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def gradients_with_faults() -> list[dict[str, Any]]:
    made: Groups = {}
    found = []
    for fault in (None, *FAULTS.values()):
        with planted(fault):
            found.append(gradients_of(CASE, made))
    return found


def test_each_fault_of_a_model_part_changes_gradients() -> None:
    ranks, unnoticed = run_world(WORLD, gradients_with_faults), []
    for number, fault in enumerate(("none", *FAULTS)):
        try:
            compare(CASE, [of_rank[number] for of_rank in ranks])
        except AssertionError:
            continue
        unnoticed.append(fault)
    assert unnoticed == ["none"]


def norms_with_faults() -> list[list[float]]:
    made: Groups = {}
    found = []
    for fault in (None, *ZERO_FAULTS.values()):
        with planted(fault):
            found.append(through_deepspeed(MESH, VARIANT, made)["norms"])
    return found


def test_each_fault_of_zero_on_a_mesh_changes_the_norm() -> None:
    ranks = run_world(WORLD, norms_with_faults)
    settings = zero_settings(MESH, VARIANT)
    _, expected = steps_alone(llama(settings, torch.float32).double(), settings, batches(), LR)
    wrong = [ranks[0][number] != pytest.approx(expected, rel=1e-5) for number in range(1 + len(ZERO_FAULTS))]
    assert dict(zip(("none", *ZERO_FAULTS), wrong, strict=True)) == {"none": False} | dict.fromkeys(ZERO_FAULTS, True)
