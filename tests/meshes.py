"""A model on a mesh of gloo processes, and what one process gets for the same documents."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.comm import RingComm
from engine.attention.kernels.choice import choose
from engine.close import error
from engine.cluster.mesh import Mesh
from engine.config.schema import Config
from engine.data.slices import micro_batch_slices
from engine.models.build import Transformer, build_model, end_step
from engine.models.common.part import Part
from engine.models.parallelize import parallelize
from engine.models.split import dim_of, slice_of
from engine.parallel.axes import Axes
from engine.parallel.pipeline import Pipeline
from engine.parallel.tensor import TensorParallel
from engine.planner.make import plan_step
from engine.planner.settings import PlanSettings
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import RankContext, evaluate, run_step
from tests.covering import Case
from tests.helpers import Batch, batch, config, llama, mixtral

CPU, WORLD, CAPACITY, LAYERS = torch.device("cpu"), 4, 40, 5
EXPERTS = ["model.experts=5", "model.top_k=2", "balance.loss_weight=0.5", "balance.z_weight=0.1"]


def settings_of(case: Case, world: int, capacity: int = CAPACITY) -> Config:
    tp, pp = case["tp_pp"]
    hdp = world // (tp * pp)
    more = [
        f"model.layers={LAYERS}",
        "model.vocab=259",
        f"model.tied={case['tied']}",
        f"recompute={case['recompute']}",
        f"mlp_tile={case.get('mlp_tile', 0)}",
    ]
    if balance := case.get("balance"):
        more += [*EXPERTS, f"balance.by={balance}", "balance.bias_rate=0.01"]
    mesh = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"cluster.ranks_per_node={world}"]
    return config(hdp, capacity, case["planner"], *more, *mesh)


def part_of(mesh: Mesh, stage: int) -> Part:
    """The part of a stage: layers as even as possible, which leaves stages unequal."""
    cuts = [LAYERS * number // mesh.pp for number in range(mesh.pp + 1)]
    return Part(range(cuts[stage], cuts[stage + 1]), stage == 0, stage == mesh.pp - 1, mesh.tp)


Groups = dict[tuple[int, ...], dist.ProcessGroup]  # by members, made once for all meshes
Built = tuple[Transformer, RankContext, Axes]


def whole_of(settings: Config, dtype: torch.dtype) -> Transformer:
    """The whole model: that of `llama`, or with experts that of `mixtral`."""
    return llama(settings, dtype) if settings.model.experts == 1 else mixtral(settings).to(dtype)


def build(settings: Config, dtype: torch.dtype, made: Groups) -> Built:
    """This device's part of the model of `whole_of`, and what it runs with."""

    def new_group(members: list[int]) -> dist.ProcessGroup:
        if tuple(members) not in made:
            made[tuple(members)] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        return made[tuple(members)]

    mesh = Mesh.of(dist.get_world_size(), settings.parallel)
    axes = Axes.of(mesh, dist.get_rank(), new_group)
    complete = whole_of(settings, dtype)
    whole, buffers = dict(complete.named_parameters()), dict(complete.named_buffers())
    model = build_model(settings, part_of(mesh, axes.place.pp)).to(dtype)
    parallelize(model, settings, CPU)
    tensor = TensorParallel(axes.tp, settings.model.vocab) if mesh.tp > 1 else None
    if tensor:
        tensor.apply(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source = whole["embedding.weight" if settings.model.tied and name == "head.weight" else name]
            parameter.copy_(slice_of(name, source, mesh.tp, axes.place.tp))
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    width = settings.model.hidden
    narrow = torch.bfloat16 if settings.dtype == "bf16" else dtype

    def stream(tokens: int) -> Tensor:
        return torch.empty(tensor.rows(tokens) if tensor else tokens, width, dtype=narrow)

    pipeline = Pipeline(axes.pp, stream) if mesh.pp > 1 else None
    kernel = choose(CPU, narrow, settings.model.head_dim)
    return model, RankContext(axes.place.hdp, CPU, RingComm(axes.hdp), kernel, pipeline=pipeline), axes


def gradients_of(case: Case, made: Groups) -> dict[str, Any]:
    """Run one step in float64 on this device of a mesh."""
    settings = settings_of(case, dist.get_world_size())
    model, context, axes = build(settings, torch.float64, made)
    table, reader = batch(axes.mesh.hdp, CAPACITY)
    plan = plan_step(table.length, PlanSettings.of(settings))
    loss, _ = run_step(plan, model, Tensor.backward, partial(micro_batch_slices, reader, table), context)
    for name, parameter in model.named_parameters():
        if axes.mesh.tp > 1 and dim_of(name) is None:
            dist.all_reduce(parameter.grad, group=axes.tp)
    evaluated = evaluate(plan, model, partial(micro_batch_slices, reader, table), context)
    told = end_step(model, partial(total_over, axes), int(table.loss_tokens.sum()))
    return {
        "loss": loss.item(),
        "evaluated": evaluated.item(),
        "told": told,
        "buffers": dict(model.named_buffers()),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "counts": [len(list(plan.of_rank(rank))) for rank in range(plan.ranks)],
        "degree": int(plan.degrees.max()),
    }


def total_over(axes: Axes, values: Tensor) -> Tensor:
    """Sum over HDP ranks and stages; the devices of a tp group have the same values."""
    if axes.place.tp:
        values.zero_()
    dist.all_reduce(values)
    return values


def compare(case: Case, found: list[dict[str, Any]]) -> None:
    """Compare the gradients of all ranks, those of `gradients_of`, with those of one process."""
    settings = settings_of(case, WORLD)
    mesh = Mesh.of(WORLD, settings.parallel)
    table, reader = batch(mesh.hdp, CAPACITY)
    model, loss, evaluated = whole_of(settings, torch.float64), 0.0, 0.0
    for sequence, length in enumerate(table.length.tolist()):
        tokens = torch.from_numpy(reader.tokens(0, 0, sequence, 0, length + 1))
        of_sequence = model(tokens[:-1], torch.arange(length), tokens[1:])
        of_sequence.backward()
        loss += of_sequence.item()
        with torch.no_grad():
            evaluated += model.eval()(tokens[:-1], torch.arange(length), tokens[1:]).item()
        model.train()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    ranks = mesh.devices()  # [pp, hdp, tp]
    told = end_step(model, lambda values: values, int(table.loss_tokens.sum()))
    for result, wanted in (("loss", loss), ("evaluated", evaluated)):
        for tp in range(mesh.tp):
            of_ranks = sum(found[rank][result] for rank in ranks[:, :, tp].flat)
            assert abs(of_ranks - wanted) < 1e-10 * wanted, (case, result)
    buffers = dict(model.named_buffers())
    for one in found:
        assert one["told"] == pytest.approx(told, rel=1e-12), case
        assert all(torch.equal(value, buffers[name]) for name, value in one["buffers"].items()), case
    for tp in range(mesh.tp):
        totals: dict[str, Tensor] = {}
        for stage in ranks[:, :, tp]:
            for name in found[stage[0]]["gradients"]:
                totals[name] = sum((found[rank]["gradients"][name] for rank in stage), torch.zeros(()))
        if case["tied"] and "head.weight" in totals:
            totals["embedding.weight"] = totals["embedding.weight"] + totals.pop("head.weight")
        assert set(totals) == set(expected), case
        for name, value in totals.items():
            assert error(value, slice_of(name, expected[name], mesh.tp, tp)) < 1e-10, f"{case}, {name}"


STEPS, LR = 3, 2.0
MESHES = [(1, 1), (2, 1), (1, 2), (2, 2)]
Variant = tuple[str, bool, float, str | None]  # dtype, tied weights, clip norm, balance of experts
VARIANTS: list[Variant] = [
    ("fp32", False, 0.0, None),
    ("fp32", True, 0.4, None),
    ("bf16", True, 0.4, None),
    # With experts the steps diverge without clipping: the norm is 230 in the third one, and errors grow as much.
    ("fp32", True, 0.4, "loss"),
    ("fp32", False, 0.4, "bias"),
    ("bf16", True, 0.1, "loss"),  # steps so small that few choices of experts flip
]


def zero_settings(mesh: tuple[int, int], variant: Variant) -> Config:
    """The context is the same on every mesh, so the same documents serve all of them."""
    dtype, tied, clip, balance = variant
    case = {"tp_pp": mesh, "planner": "adaptive", "tied": tied, "recompute": "none", "balance": balance}
    settings = settings_of(case, WORLD, 2 * CAPACITY * mesh[0] * mesh[1] // WORLD)
    optimizer = settings.optimizer.model_copy(update={"clip_norm": clip})
    return settings.model_copy(update={"dtype": dtype, "optimizer": optimizer})


def batches() -> list[Batch]:
    return [batch(2, CAPACITY, step) for step in range(STEPS)]


def through_deepspeed(mesh: tuple[int, int], variant: Variant, made: Groups) -> dict[str, Any]:
    """Train some steps with ZeRO-1 on this device of a mesh: its norms, and the fp32 weights before and after."""
    from deepspeed.utils import safe_get_full_fp32_param

    from engine.zero.engine import ZeroEngine

    settings = zero_settings(mesh, variant)
    model, context, axes = build(settings, torch.float32, made)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine, norms = ZeroEngine(model, build_optimizer(model, settings.optimizer), settings, axes), []
    for table, reader in batches():
        plan = plan_step(table.length, PlanSettings.of(settings))
        backward = partial(engine.backward, step_loss_tokens=int(table.loss_tokens.sum()))
        run_step(plan, engine.forward, backward, partial(micro_batch_slices, reader, table), context)
        norms.append(engine.step(LR))
        end_step(model, partial(total_over, axes), int(table.loss_tokens.sum()))
    after = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    return {"norms": norms, "before": before, "after": after}
