"""Plan invariance on meshes: tensor and pipeline parallelism beside HDP give the gradients of one process.

In float64 and without DeepSpeed: each device's gradients are summed over its hdp group by the test, then compared with
the device's slice of the gradients of a plain model that runs each sequence by itself. What ZeRO does not know is summed
here as well: norms over tp, because each device has the gradient of its own rows, and the copies of a tied weight.
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
from engine.models.llama.split import dim_of, slice_of
from engine.models.parallelize import parallelize
from engine.parallel.pipeline import Pipeline
from engine.parallel.tensor import TensorParallel
from engine.planner.make import plan_step
from engine.planner.settings import PlanSettings
from engine.trainer.step import RankContext, run_step
from tests.covering import Case, every, pairwise
from tests.helpers import batch, config, llama
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


def settings_of(case: Case, world: int) -> Config:
    tp, pp = case["tp_pp"]
    hdp = world // (tp * pp)
    more = [f"model.layers={LAYERS}", "model.vocab=259", f"model.tied={case['tied']}", f"recompute={case['recompute']}"]
    mesh = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"cluster.ranks_per_node={world}"]
    return config(hdp, CAPACITY, case["planner"], *more, *mesh)


def part_of(mesh: Mesh, stage: int) -> Part:
    """The part of a stage: layers as even as possible, which leaves stages unequal."""
    cuts = [LAYERS * number // mesh.pp for number in range(mesh.pp + 1)]
    return Part(range(cuts[stage], cuts[stage + 1]), stage == 0, stage == mesh.pp - 1, mesh.tp)


def group(mesh: Mesh, axis: Any, made: dict[tuple[int, ...], dist.ProcessGroup]) -> dist.ProcessGroup:
    """The group of this rank on an axis, made once for all meshes."""
    members = tuple(mesh.members(dist.get_rank(), axis))
    if members not in made:
        made[members] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return made[members]


def gradients_of(case: Case, made: dict[tuple[int, ...], dist.ProcessGroup]) -> dict[str, Any]:
    """Run one step in float64 on this device of a mesh."""
    world = dist.get_world_size()
    settings = settings_of(case, world)
    mesh = Mesh.of(world, settings.parallel)
    place = mesh.place(dist.get_rank())
    whole = dict(llama(settings, torch.float64).named_parameters())
    model = Llama(settings.model, part_of(mesh, place.pp)).double()
    parallelize(model, settings, CPU)
    tensor = TensorParallel(group(mesh, "tp", made), settings.model.vocab) if mesh.tp > 1 else None
    if tensor:
        tensor.apply(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source = whole["embedding.weight" if case["tied"] and name == "head.weight" else name]
            parameter.copy_(slice_of(name, source, mesh.tp, place.tp))

    def stream(tokens: int) -> Tensor:
        return torch.empty(tensor.rows(tokens) if tensor else tokens, settings.model.hidden, dtype=torch.float64)

    pipeline = Pipeline(group(mesh, "pp", made), stream) if mesh.pp > 1 else None
    kernel = choose(CPU, torch.float64, settings.model.head_dim)
    context = RankContext(place.hdp, CPU, RingComm(group(mesh, "hdp", made)), kernel, pipeline=pipeline)
    table, reader = batch(mesh.hdp, CAPACITY)
    plan = plan_step(table.length, PlanSettings.of(settings))
    loss, _ = run_step(plan, model, Tensor.backward, partial(micro_batch_slices, reader, table), context)
    for name, parameter in model.named_parameters():
        if mesh.tp > 1 and dim_of(name) is None:
            dist.all_reduce(parameter.grad, group=group(mesh, "tp", made))
    return {
        "loss": loss.item(),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "counts": [len(list(plan.of_rank(rank))) for rank in range(plan.ranks)],
        "degree": int(plan.degrees.max()),
    }


def all_gradients(cases: list[Case]) -> list[dict[str, Any]]:
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
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
