"""A model on a mesh of gloo processes, and what one process gets for the same documents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.comm import RingComm
from engine.attention.kernels.choice import choose
from engine.close import error
from engine.cluster.communicators import communicators
from engine.cluster.mesh import Group, Mesh, Place
from engine.config.schema import Config
from engine.data.inputs import rank_inputs
from engine.family.families import family_of, parameters_of
from engine.family.parameters import Parameter
from engine.job import Job
from engine.models.build import build_model
from engine.models.decoder import Decoder
from engine.models.parallelize import parallelize
from engine.parallel import alone as of_one_rank
from engine.parallel.axes import Axes
from engine.parallel.expert import ExpertParallel
from engine.parallel.pipeline import Pipeline
from engine.parallel.tensor import TensorParallel
from engine.planner.make import plan_step
from engine.trainer.model import make_offload, part_of
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import RankContext, evaluate, run_step
from engine.units import PPM
from engine.zero.shards import gathered, sharded
from tests.covering import Case
from tests.helpers import Batch, batch, config, family, llama, losses_of, mixtral
from tests.planner.pipelines import sliced
from tests.slices import slice_of

CPU, WORLD, CAPACITY, LAYERS = torch.device("cpu"), 4, 40, 5
EXPERTS = ["model.top_k=2", "balance.loss_weight=0.5", "balance.z_weight=0.1"]


def settings_of(case: Case, world: int, capacity: int = CAPACITY) -> Config:
    tp, pp, *ep = case["tp_pp"]
    hdp = world // (tp * pp)
    more = [
        f"model.layers={LAYERS}",
        "model.vocab=259",
        f"model.tied={case['tied']}",
        f"recompute={case['recompute']}",
        f"mlp_tile={case.get('mlp_tile', 0)}",
    ]
    balance = case.get("balance")
    more += family(balance is not None, case.get("qwen3", False))
    if balance is not None:
        more += [*EXPERTS, f"model.experts={case.get('experts', 5)}", f"balance.by={balance}", "balance.bias_rate=0.01"]
    mesh = [
        f"parallel.tp={tp}",
        f"parallel.pp={pp}",
        f"parallel.ep={ep[0] if ep else 1}",
        f"cluster.ranks_per_node={world}",
    ]
    return config(hdp, capacity, case["planner"], *more, *mesh)


Groups = dict[tuple[int, ...], dist.ProcessGroup]  # by members, made once for all meshes
Built = tuple[Decoder, RankContext, Axes]


def whole_of(settings: Config, dtype: torch.dtype) -> Decoder:
    """The whole model: that of `llama`, or with experts that of `mixtral`."""
    return mixtral(settings).to(dtype) if family_of(settings.model).experts else llama(settings, dtype)


def build(settings: Config, dtype: torch.dtype, made: Groups) -> Built:
    """This device's part of the model of `whole_of`, and what it runs with."""

    mesh, rank = Mesh.of(dist.get_world_size(), settings.parallel), dist.get_rank()
    # PyTorch names a group after how many its members have: all ranks create theirs at the same time, also a stage that
    # gets none with the first and the last one.
    ends = tuple(mesh.members(rank, "pp")[:: max(mesh.pp - 1, 1)])

    def group(kind: Group) -> dist.ProcessGroup:
        members = tuple(mesh.members(rank, kind))
        key = ends if kind == "tied" else members
        if key not in made:
            new = partial(dist.new_group, members, backend="gloo", use_local_synchronization=True)
            made[key] = new() if len(members) > 1 else of_one_rank.alone()
        return made[key]

    tied = settings.model.tied
    groups = {one.group: group(one.group) for one in communicators(mesh, tied)}

    def only() -> dist.ProcessGroup:
        if (rank,) not in made:
            made[rank,] = of_one_rank.alone()
        return made[rank,]

    axes = Axes.of(mesh, rank, tied, groups, only)
    complete = whole_of(settings, dtype)
    whole, buffers = dict(complete.named_parameters()), dict(complete.named_buffers())
    part = part_of(settings, axes.place)
    with sharded(settings, axes):
        model = build_model(settings, part).to(dtype)
    tensor = TensorParallel(axes.tp, settings.model.vocab) if mesh.tp > 1 else None
    offload = make_offload(settings, CPU, 1 << 30, part)
    parallelize(model, settings, CPU, offload, tensor, ExpertParallel(axes.ep) if axes.ep else None)
    table = parameters_of(settings.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source = whole["embedding.weight" if settings.model.tied and name == "head.weight" else name]
            with gathered(parameter):
                parameter.copy_(own_slice(table[name], source, mesh, axes.place))
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    width = settings.model.hidden
    narrow = torch.bfloat16 if settings.dtype == "bf16" else dtype

    def stream(tokens: int) -> Tensor:
        return torch.empty(tensor.rows(tokens) if tensor else tokens, width, dtype=narrow)

    pipeline = Pipeline(axes.pp, stream) if mesh.pp > 1 else None
    kernel = choose(CPU, narrow, settings.model.head_dim)
    comm = RingComm(groups.get("rings", axes.hdp))
    return model, RankContext(axes.place.hdp, CPU, comm, kernel, offload, pipeline), axes


def own_slice(parameter: Parameter, whole: Tensor, mesh: Mesh, place: Place) -> Tensor:
    """What the device at a place stores of a parameter."""
    if mesh.ep > 1 and parameter.stacked:
        return whole.chunk(mesh.ep)[place.hdp % mesh.ep]
    return slice_of(parameter, whole, mesh.tp, place.tp)


def gradients_of(case: Case, made: Groups) -> dict[str, Any]:
    """Run one step in float64 on this device of a mesh."""
    settings = settings_of(case, dist.get_world_size())
    model, context, axes = build(settings, torch.float64, made)
    table, reader = batch(axes.mesh.hdp, CAPACITY)
    plan = plan_step(table.length, Job(settings).settings)
    if slices := case.get("slices", 0):
        plan = sliced(plan, slices, max(1, axes.mesh.pp), seed=slices + axes.mesh.pp)
    plan.offload[:] = round(case["offload"] * PPM)
    loss, _ = run_step(plan, model, Tensor.backward, partial(rank_inputs, reader, table), context)
    losses = {"loss": loss.item()}
    if case.get("validates"):
        losses["evaluated"] = evaluate(plan, model, partial(rank_inputs, reader, table), context).item()
    told = model.end_step(partial(total_over, axes), int(table.loss_tokens.sum()))
    return {
        "losses": losses,
        "told": told,
        "buffers": dict(model.named_buffers()),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "counts": [len(list(plan.of_rank(rank))) for rank in range(plan.ranks)],
        "degree": int(plan.degrees.max()),
        "team": int(plan.team.max()),
        "kept": len(context.prefixes),
        "moved": context.offload.moved_bytes if context.offload else 0,
    }


def total_over(axes: Axes, values: Tensor) -> Tensor:
    """Sum over HDP ranks and stages; the devices of a tp group have the same values."""
    if axes.place.tp:
        values.zero_()
    dist.all_reduce(values)
    return values


class Alone(NamedTuple):
    """What one process gets, that runs each sequence by itself."""

    loss: float
    evaluated: float
    told: dict[str, float]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


@cache
def alone(hdp: int, tied: bool, balance: str | None, qwen3: bool) -> Alone:
    """Run the documents of a mesh of `hdp` HDP ranks through the whole model, in float64 and without recompute."""
    case: Case = {"tp_pp": (1, 1), "planner": "adaptive", "tied": tied, "recompute": "none"}
    case |= {"balance": balance, "qwen3": qwen3}
    model, (table, reader) = whole_of(settings_of(case, hdp), torch.float64), batch(hdp, CAPACITY)
    loss, evaluated = losses_of(model, table, reader)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    told = model.end_step(lambda values: values, int(table.loss_tokens.sum()))
    return Alone(loss, evaluated, told, gradients, dict(model.named_buffers()))


def compare(case: Case, found: list[dict[str, Any]]) -> float:
    """Compare the gradients of all ranks, those of `gradients_of`, with those of one process. Returns the largest
    error."""
    settings = settings_of(case, len(found))
    mesh, table = Mesh.of(len(found), settings.parallel), parameters_of(settings.model)
    expected, worst = alone(mesh.hdp, case["tied"], case.get("balance"), case.get("qwen3", False)), 0.0
    ranks = mesh.devices()  # [pp, hdp, tp]
    losses = {"loss": expected.loss} | ({"evaluated": expected.evaluated} if case.get("validates") else {})
    for result, wanted in losses.items():
        for tp in range(mesh.tp):
            of_ranks = sum(found[rank]["losses"][result] for rank in ranks[:, :, tp].flat)
            assert abs(of_ranks - wanted) < 1e-10 * wanted, (case, result)
    for one in found:
        assert one["told"] == pytest.approx(expected.told, rel=1e-12), case
        assert all(torch.equal(value, expected.buffers[name]) for name, value in one["buffers"].items()), case
    for tp in range(mesh.tp):
        totals: dict[str, Tensor] = {}
        for stage in ranks[:, :, tp]:
            for name in found[stage[0]]["gradients"]:
                totals[name] = sum((found[rank]["gradients"][name] for rank in stage), torch.zeros(()))
        if case["tied"] and "head.weight" in totals:
            totals["embedding.weight"] = totals["embedding.weight"] + totals.pop("head.weight")
        assert set(totals) == set(expected.gradients), case
        for name, value in totals.items():
            worst = max(worst, error(value, slice_of(table[name], expected.gradients[name], mesh.tp, tp)))
            assert worst < 1e-10, f"{case}, {name}"
    return worst


STEPS, LR = 2, 2.0  # with momentum the second step depends on the first


class Variant(NamedTuple):
    dtype: str
    tied: bool
    clip: float
    balance: str | None = None  # of experts
    stage: int = 1
    shared: bool = False  # experts over several HDP ranks
    qwen3: bool = False
    meshes: Sequence[tuple[int, ...]] = ()  # tp, pp and ep, (1, 1) first


# tp, pp and ep. A device of (2, 2) is alone in its hdp group, one of (2, 1) or (1, 2) is not. ZeRO-2 and ZeRO-3 have no
# pipelines.
HDP, TP, PP, BOTH = (1, 1), (2, 1), (1, 2), (2, 2)
EP, WIDE_EP = (1, 1, 2), (1, 1, 4)


VARIANTS = [
    Variant("fp32", tied=False, clip=0.0, meshes=[HDP, TP, PP, BOTH]),
    Variant("fp32", tied=True, clip=0.4, qwen3=True, meshes=[HDP, PP]),
    Variant("bf16", tied=True, clip=0.4, qwen3=True, meshes=[HDP, TP, BOTH]),
    # With experts the steps diverge without clipping: the norm is 230 in a third one, and errors grow as much.
    Variant("fp32", tied=True, clip=0.4, balance="loss", meshes=[HDP, PP, BOTH]),
    Variant("fp32", tied=False, clip=0.4, balance="bias", qwen3=True, meshes=[HDP, TP, BOTH]),
    # Steps so small that few choices of experts flip.
    Variant("bf16", tied=True, clip=0.1, balance="loss", meshes=[HDP, PP, BOTH]),
    Variant("fp32", tied=True, clip=0.4, stage=2, qwen3=True, meshes=[HDP, TP]),
    Variant("bf16", tied=True, clip=0.4, stage=3, qwen3=True, meshes=[HDP, TP]),
    Variant("fp32", tied=False, clip=0.4, balance="loss", stage=3, qwen3=True, meshes=[HDP, TP]),
    Variant("fp32", tied=True, clip=0.4, balance="loss", shared=True, meshes=[HDP, EP, WIDE_EP]),
    Variant("bf16", tied=False, clip=0.1, balance="loss", shared=True, meshes=[HDP, EP, WIDE_EP]),
    Variant("fp32", tied=False, clip=0.4, balance="bias", stage=2, shared=True, meshes=[HDP, WIDE_EP]),
]


def zero_settings(mesh: tuple[int, ...], variant: Variant) -> Config:
    """The context is the same on every mesh, so the same documents serve all of them."""
    case = {"tp_pp": mesh, "planner": "adaptive", "tied": variant.tied, "recompute": "none", "balance": variant.balance}
    case |= {"experts": 4 if variant.shared else 5, "qwen3": variant.qwen3}
    settings = settings_of(case, WORLD, 2 * CAPACITY * mesh[0] * mesh[1] // WORLD)
    optimizer = settings.optimizer.model_copy(update={"clip_norm": variant.clip})
    zero = settings.zero.model_copy(update={"stage": variant.stage})
    return settings.model_copy(update={"dtype": variant.dtype, "optimizer": optimizer, "zero": zero})


def batches() -> list[Batch]:
    return [batch(2, CAPACITY, step) for step in range(STEPS)]


def through_deepspeed(mesh: tuple[int, ...], variant: Variant, made: Groups) -> dict[str, Any]:
    """Train some steps with ZeRO on this device of a mesh: its norms, and the fp32 weights before and after."""
    from engine.zero.engine import ZeroEngine
    from tests.zero.full import masters

    settings = zero_settings(mesh, variant)
    model, context, axes = build(settings, torch.float32, made)
    engine, norms = ZeroEngine(model, build_optimizer(model, settings.optimizer, axes.mesh.ep), settings, axes), []
    before = masters(engine)
    for table, reader in batches():
        plan = plan_step(table.length, Job(settings).settings)
        backward = partial(engine.backward, step_loss_tokens=int(table.loss_tokens.sum()))
        run_step(plan, engine.forward, backward, partial(rank_inputs, reader, table), context)
        norms.append(engine.step(LR))
        model.end_step(partial(total_over, axes), int(table.loss_tokens.sum()))
    return {"norms": norms, "before": before, "after": masters(engine)}
