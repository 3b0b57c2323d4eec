"""Plan invariance on meshes: tensor and pipeline parallelism beside HDP give the gradients of one process.

In float64 and without DeepSpeed, the test sums each device's gradients over its hdp group, and compares them with the
device's slice of the gradients of a plain model that runs each sequence by itself. It also sums what ZeRO does not know:
norms over tp, because each device has the gradient of its own rows, and the copies of a tied weight.
"""

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
from engine.trainer.step import RankContext, run_step
from tests.covering import Case, every, pairwise
from tests.helpers import Batch, batch, config, llama, steps_alone
from tests.world import run_world

CPU, WORLD, CAPACITY, LAYERS = torch.device("cpu"), 4, 40, 5
FACTORS: dict[str, list[Any]] = {
    "tp_pp": [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)],
    "planner": ["static", "naive", "balanced", "adaptive"],
    "tied": [False, True],
    "recompute": ["none", "layer", "layer_keep_attention"],
}


def cases() -> list[Case]:
    return pairwise(FACTORS)


def settings_of(case: Case, world: int, capacity: int = CAPACITY) -> Config:
    tp, pp = case["tp_pp"]
    hdp = world // (tp * pp)
    more = [f"model.layers={LAYERS}", "model.vocab=259", f"model.tied={case['tied']}", f"recompute={case['recompute']}"]
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
    return {
        "loss": loss.item(),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "counts": [len(list(plan.of_rank(rank))) for rank in range(plan.ranks)],
        "degree": int(plan.degrees.max()),
    }


def all_gradients(cases: list[Case]) -> list[dict[str, Any]]:
    made: Groups = {}
    return [gradients_of(case, made) for case in cases]


def check(cases: list[Case], world: int) -> None:
    """Compare the gradients of all cases with those of one process."""
    ranks, unequal, rings = run_world(world, all_gradients, cases), False, set[str]()
    for number, case in enumerate(cases):
        settings = settings_of(case, world)
        mesh = Mesh.of(world, settings.parallel)
        table, reader = batch(mesh.hdp, CAPACITY)
        model = llama(settings, torch.float64)
        loss = 0.0
        for sequence, length in enumerate(table.length.tolist()):
            tokens = torch.from_numpy(reader.tokens(0, 0, sequence, 0, length + 1))
            of_sequence = model(tokens[:-1], torch.arange(length), tokens[1:])
            of_sequence.backward()
            loss += of_sequence.item()
        found = [ranks[rank][number] for rank in range(world)]
        places = [mesh.place(rank) for rank in range(world)]
        losses = [one["loss"] for one, at in zip(found, places, strict=True) if at.pp == mesh.pp - 1 and at.tp == 0]
        assert abs(sum(losses) - loss) < 1e-10 * loss, case
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        for tp in range(mesh.tp):
            # By stage: the sum over its hdp group.
            sums: list[dict[str, Tensor]] = []
            for pp in range(mesh.pp):
                own = [one["gradients"] for one, at in zip(found, places, strict=True) if (at.tp, at.pp) == (tp, pp)]
                sums.append({name: sum(of_rank[name] for of_rank in own) for name in own[0]})
            totals = {name: value for of_stage in sums for name, value in of_stage.items()}
            if case["tied"] and "head.weight" in totals:
                totals["embedding.weight"] = totals["embedding.weight"] + totals.pop("head.weight")
            assert set(totals) == set(expected), case
            for name, value in totals.items():
                assert error(value, slice_of(name, expected[name], mesh.tp, tp)) < 1e-10, f"{case}, {name}"
        unequal |= mesh.pp > 1 and len(set(found[0]["counts"])) > 1
        rings |= {axis for axis in ("tp", "pp") if getattr(mesh, axis) > 1 and found[0]["degree"] > 1}
    assert unequal, "no pipeline had unequal numbers of micro-batches: the test shows too little"
    assert rings == {"tp", "pp"}, "no rings beside tp or pp: the test shows too little"


def test_float64_gradients_on_every_mesh_are_those_of_one_process() -> None:
    check(cases(), WORLD)


@pytest.mark.slow
def test_float64_gradients_of_all_combinations() -> None:
    check(every(FACTORS), WORLD)


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


def all_through_deepspeed() -> list[dict[str, Any]]:
    made: Groups = {}
    return [through_deepspeed(mesh, variant, made) for variant in VARIANTS for mesh in MESHES]


def test_steps_through_deepspeed_on_every_mesh_are_those_of_one_process() -> None:
    """SGD with momentum, with clipping off and on. Copies of a parameter are equal to the last bit."""
    ranks, number = run_world(WORLD, all_through_deepspeed), -1
    for variant in VARIANTS:
        dtype, tied, _ = variant
        settings = zero_settings((1, 1), variant)
        alone = llama(settings, torch.float32)
        start = (alone.bfloat16() if dtype == "bf16" else alone).double()
        expected, norms = steps_alone(start, settings, batches(), LR)
        end = {name: parameter.detach() for name, parameter in start.named_parameters()}
        if tied:
            expected["head.weight"], end["head.weight"] = expected["embedding.weight"], end["embedding.weight"]
        errors = []
        for mesh in (Mesh(WORLD // (tp * pp), tp, pp) for tp, pp in MESHES):
            number += 1
            found = {rank: ranks[rank][number] for rank in range(WORLD)}
            worst, squares, count = 0.0, 0.0, 0
            for rank, one in found.items():
                tp = mesh.place(rank).tp
                assert one["norms"] == found[0]["norms"], (variant, mesh, "ranks have different norms")
                assert one["norms"] == pytest.approx(norms, rel=1e-5 if dtype == "fp32" else 2e-2), (variant, mesh)
                for name, after in one["after"].items():
                    change = after - one["before"][name]
                    worst = max(worst, error(change, slice_of(name, expected[name], mesh.tp, tp)))
                    squares += float((after - slice_of(name, end[name], mesh.tp, tp)).square().sum())
                    count += after.numel()
            check_copies(found, mesh, tied)
            errors.append(worst if dtype == "fp32" else (squares / count) ** 0.5)
        # Errors of float32 grow with the depth of sums, not with the mesh.
        assert max(errors) <= (1.5 if dtype == "fp32" else 2) * errors[0], (variant, errors)


def check_copies(found: dict[int, dict[str, Any]], mesh: Mesh, tied: bool) -> None:
    """What several devices store must be equal to the last bit: norms over tp, all over HDP, a tied weight's copies."""
    for rank, one in found.items():
        for other in mesh.members(rank, "hdp"):
            assert equal(one["after"], found[other]["after"]), f"HDP ranks of {rank}, {mesh}"
        norms = [name for name in one["after"] if dim_of(name) is None]
        for other in mesh.members(rank, "tp"):
            for name in norms:
                assert torch.equal(one["after"][name], found[other]["after"][name]), f"{name} of {rank}, {mesh}"
        if tied and mesh.pp > 1 and mesh.place(rank).pp == 0:
            last = found[mesh.members(rank, "pp")[-1]]["after"]["head.weight"]
            assert torch.equal(one["after"]["embedding.weight"], last), f"tied weight of {rank}, {mesh}"


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())
