"""A model on a mesh of gloo processes, and what one process gets for the same documents."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.comm import RingComm
from engine.attention.kernels.choice import choose
from engine.close import error
from engine.cluster.mesh import Mesh
from engine.config.schema import Config
from engine.data.slices import micro_batch_slices
from engine.models.common.part import Part
from engine.models.llama.model import Llama
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
from tests.helpers import Batch, batch, config, llama

CPU, WORLD, CAPACITY, LAYERS = torch.device("cpu"), 4, 40, 5


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
    mesh = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"cluster.ranks_per_node={world}"]
    return config(hdp, capacity, case["planner"], *more, *mesh)


def part_of(mesh: Mesh, stage: int) -> Part:
    """The part of a stage: layers as even as possible, which leaves stages unequal."""
    cuts = [LAYERS * number // mesh.pp for number in range(mesh.pp + 1)]
    return Part(range(cuts[stage], cuts[stage + 1]), stage == 0, stage == mesh.pp - 1, mesh.tp)


Groups = dict[tuple[int, ...], dist.ProcessGroup]  # by members, made once for all meshes
Built = tuple[Llama, RankContext, Axes]


def build(settings: Config, dtype: torch.dtype, made: Groups) -> Built:
    """This device's part of the model of `llama`, and what it runs with."""

    def new_group(members: list[int]) -> dist.ProcessGroup:
        if tuple(members) not in made:
            made[tuple(members)] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        return made[tuple(members)]

    mesh = Mesh.of(dist.get_world_size(), settings.parallel)
    axes = Axes.of(mesh, dist.get_rank(), new_group)
    whole = dict(llama(settings, dtype).named_parameters())
    model = Llama(settings.model, part_of(mesh, axes.place.pp)).to(dtype)
    parallelize(model, settings, CPU)
    tensor = TensorParallel(axes.tp, settings.model.vocab) if mesh.tp > 1 else None
    if tensor:
        tensor.apply(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source = whole["embedding.weight" if settings.model.tied and name == "head.weight" else name]
            parameter.copy_(slice_of(name, source, mesh.tp, axes.place.tp))
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
    return {
        "loss": loss.item(),
        "evaluated": evaluated.item(),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "counts": [len(list(plan.of_rank(rank))) for rank in range(plan.ranks)],
        "degree": int(plan.degrees.max()),
    }


def compare(case: Case, found: list[dict[str, Any]]) -> None:
    """Compare the gradients of all ranks, those of `gradients_of`, with those of one process."""
    settings = settings_of(case, WORLD)
    mesh = Mesh.of(WORLD, settings.parallel)
    table, reader = batch(mesh.hdp, CAPACITY)
    model, loss = llama(settings, torch.float64), 0.0
    for sequence, length in enumerate(table.length.tolist()):
        tokens = torch.from_numpy(reader.tokens(0, 0, sequence, 0, length + 1))
        of_sequence = model(tokens[:-1], torch.arange(length), tokens[1:])
        of_sequence.backward()
        loss += of_sequence.item()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    ranks = mesh.devices()  # [pp, hdp, tp]
    for result in ("loss", "evaluated"):
        assert abs(sum(found[rank][result] for rank in ranks[-1, :, 0]) - loss) < 1e-10 * loss, (case, result)
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
VARIANTS = [("fp32", False, 0.0), ("fp32", True, 0.4), ("bf16", True, 0.4)]  # dtype, tied weights, clip norm
Variant = tuple[str, bool, float]


def zero_settings(mesh: tuple[int, int], variant: Variant) -> Config:
    """The context is the same on every mesh, so the same documents serve all of them."""
    dtype, tied, clip = variant
    case = {"tp_pp": mesh, "planner": "adaptive", "tied": tied, "recompute": "none"}
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
    after = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    return {"norms": norms, "before": before, "after": after}
