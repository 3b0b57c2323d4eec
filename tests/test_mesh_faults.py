"""Each fault of tensor and pipeline parallelism that would be silent makes plan invariance fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import engine.models.decoder as mixtral_module
import engine.parallel.tensor as tensor_module
import engine.trainer.step as step_module
import engine.zero.engine as engine_module
import engine.zero.sharded as sharded_module
from engine.models.common.attention import Shards
from engine.models.experts.balance import expert_counts, z_loss
from engine.models.experts.layer import LocalRoute, Routed
from engine.parallel.axes import Axes
from engine.parallel.pipeline import with_gradient
from engine.parallel.tensor import TensorParallel, TensorRoute
from engine.zero import initialize
from engine.zero.engine import ZeroEngine
from engine.zero.mpu import copies
from tests.covering import Case
from tests.helpers import steps_alone
from tests.meshes import (
    LR,
    TP,
    WORLD,
    Groups,
    Variant,
    batches,
    compare,
    gradients_of,
    through_deepspeed,
    whole_of,
    zero_settings,
)
from tests.world import run_world

pytestmark = pytest.mark.world

MESH = (2, 2)
CASE: Case = {"tp_pp": MESH, "planner": "adaptive", "tied": False, "recompute": "none", "offload": 0.0}
VARIANT = Variant("fp32", tied=True, clip=0.0)
EXPERTS: Case = CASE | {"balance": "loss"}
EXPERTS_VARIANT = Variant("fp32", tied=True, clip=0.4, balance="loss")
STAGE_3_VARIANT = Variant("fp32", tied=True, clip=0.0, stage=3)


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
    "norms are not summed over devices": (TensorParallel, "shared", lambda self, weight: weight),
    "gradients of the next stage are lost": (step_module, "with_gradient", lambda out, gradient: out.sum() * 0),
}


def own_weights(self: TensorRoute, weights: Tensor) -> Tensor:
    """The rows of other devices get weights of this one."""
    return LocalRoute.spread_weights(self, weights.repeat(self._tensor.size, 1))


def partial_weights(self: TensorRoute, weights: Tensor) -> Tensor:
    """The gradients of weights are those of a device's slice of the experts."""
    return no_sum(self._tensor, LocalRoute.collect_weights(self, weights))


def z_loss_of_padding(routed: list[Routed], labels: Tensor) -> Tensor:
    padding = len(routed[0].logits) - len(labels)
    return z_loss(routed, torch.nn.functional.pad(labels, (0, padding)))


def counts_of_padding(routed: list[Routed], shards: Shards, own: slice) -> Tensor:
    """The padding counts for the last shard."""
    if not len(shards.lengths):
        return expert_counts(routed, shards, own)
    more = torch.full((len(routed[0].logits),), len(shards.lengths) - 1)
    ids = torch.cat([shards.ids[own], more])[: len(more)]
    return expert_counts(routed, shards._replace(ids=ids), slice(None))


def summed_gradient(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None]:
    """The gradient of a device's share is that of as many sums as there are devices."""
    return dtotal * MESH[0], None


# With experts.
EXPERT_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "weights do not travel with the tokens": (TensorRoute, "spread_weights", own_weights),
    "gradients of weights are not summed": (TensorRoute, "collect_weights", partial_weights),
    "counts are those of own rows": (TensorParallel, "sum", lambda self, counts: counts),
    "shares of the balance are not added": (TensorParallel, "total", lambda self, share: share),
    "a share of the balance counts on each device": (tensor_module._Total, "backward", staticmethod(summed_gradient)),
    "every device balances all tokens": (TensorParallel, "own", lambda self, tokens: slice(0, self.rows(tokens))),
    "the padding has a z-loss": (mixtral_module, "z_loss", z_loss_of_padding),
    "the padding is counted": (mixtral_module, "expert_counts", counts_of_padding),
    "the balance of inner stages is lost": (step_module, "_loss_of", lambda out, grad: with_gradient(out.stream, grad)),
}


def without_slices(model: nn.Module, axes: Axes, tied: bool) -> set[nn.Parameter]:
    """Take slices of matrices for copies."""
    return {*model.parameters()} if axes.place.tp else copies(model, axes, tied)


def routers_apart(self: TensorParallel, weight: Tensor) -> Tensor:
    """Sum the gradients of norms, but not those of routers."""
    return weight if weight.dim() == 2 else SHARED(self, weight)


def scaled_by_world(self: ZeroEngine, loss_sum: Tensor, step_loss_tokens: int) -> None:
    """The loss is multiplied by the number of devices, not of HDP ranks."""
    hdp = WORLD // (MESH[0] * MESH[1])
    BACKWARD(self, loss_sum * (WORLD // hdp), step_loss_tokens)


WITHOUT_SUM = SimpleNamespace(**{**vars(dist), "all_reduce": lambda squares: None})
BACKWARD, SHARED = ZeroEngine.backward, TensorParallel.shared
ZERO_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "slices are counted on one device": (initialize, "copies", without_slices),
    "the copy of the tied weight is counted": (
        initialize,
        "copies",
        lambda model, axes, tied: copies(model, axes, tied=False),
    ),
    "norms are not summed over tp": (TensorParallel, "shared", lambda self, weight: weight),
    "the tied weight is not summed over stages": (engine_module, "sum_copies", lambda model, axes: None),
    "the norm is that of a rank's shards": (sharded_module, "dist", WITHOUT_SUM),
    "the loss is scaled by the world": (ZeroEngine, "backward", scaled_by_world),
}

EXPERT_ZERO_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "routers are not summed over tp": (TensorParallel, "shared", routers_apart),
    "slices of experts are counted on one device": (initialize, "copies", without_slices),
}
STAGE_3_FAULTS: dict[str, tuple[Any, str, Any]] = {
    "slices are not marked": (initialize, "mark", lambda model, axes: None)
}
MODEL_FAULTS = [(CASE, FAULTS), (EXPERTS, EXPERT_FAULTS)]
NORM_FAULTS = [
    (MESH, VARIANT, ZERO_FAULTS),
    (MESH, EXPERTS_VARIANT, EXPERT_ZERO_FAULTS),
    (TP, STAGE_3_VARIANT, STAGE_3_FAULTS),
]


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


def gradients_with_faults() -> list[list[dict[str, Any]]]:
    made: Groups = {}
    found = []
    for case, faults in MODEL_FAULTS:
        found.append([])
        for fault in (None, *faults.values()):
            with planted(fault):
                found[-1].append(gradients_of(case, made))
    return found


def test_each_fault_of_a_model_part_changes_gradients() -> None:
    ranks = run_world(WORLD, gradients_with_faults)
    for place, (case, faults) in enumerate(MODEL_FAULTS):
        unnoticed = []
        for number, fault in enumerate(("none", *faults)):
            try:
                compare(case, [of_rank[place][number] for of_rank in ranks])
            except AssertionError:
                continue
            unnoticed.append(fault)
        assert unnoticed == ["none"]


def norms_with_faults() -> list[list[list[float]]]:
    made: Groups = {}
    found = []
    for mesh, variant, faults in NORM_FAULTS:
        found.append([])
        for fault in (None, *faults.values()):
            with planted(fault):
                found[-1].append(through_deepspeed(mesh, variant, made)["norms"])
    return found


def test_each_fault_of_zero_on_a_mesh_changes_the_norm() -> None:
    norms = run_world(WORLD, norms_with_faults)[0]
    for (mesh, variant, faults), of_variant in zip(NORM_FAULTS, norms, strict=True):
        settings = zero_settings(mesh, variant)
        _, expected = steps_alone(whole_of(settings, torch.float32).double(), settings, batches(), LR)
        wrong = [found != pytest.approx(expected, rel=1e-5) for found in of_variant]
        assert dict(zip(("none", *faults), wrong, strict=True)) == {"none": False} | dict.fromkeys(faults, True)
