"""Plan invariance on meshes: tensor and pipeline parallelism beside HDP give the gradients of one process.

In float64 and without DeepSpeed, the test sums each device's gradients over its hdp group, and compares them with the
device's slice of the gradients of a plain model that runs each sequence by itself. It also sums what ZeRO does not
know: norms over tp, because each device has the gradient of its own rows, and the copies of a tied weight.

In float32 and bf16, through DeepSpeed, the weights after some steps are compared. Faults of this area are silent, so
the last tests plant each of them and require that the comparison fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cluster.mesh import Mesh
from engine.family.families import parameters_of
from engine.family.parameters import Parameters
from tests.covering import Case, every, pairwise
from tests.helpers import change_error, steps_alone
from tests.meshes import (
    LR,
    VARIANTS,
    WORLD,
    Groups,
    batches,
    compare,
    gradients_of,
    own_slice,
    settings_of,
    through_deepspeed,
    whole_of,
    zero_settings,
)
from tests.world import run_world

pytestmark = pytest.mark.world

FACTORS: dict[str, list[Any]] = {
    "world": [2, 4, 8],
    "tp_pp": [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4)],
    "planner": ["static", "naive", "balanced", "adaptive"],
    "tied": [False, True],
    "recompute": ["none", "layer", "layer_keep_attention"],
    "mlp_tile": [0, 3],
    "offload": [0.0, 0.5, 1.0],
    "balance": [None, "loss", "bias"],
    "qwen3": [False, True],
    "slices": [0, 1, 2, 3, 7],  # 0: as planned; else every sequence is cut, and runs in an order of its own
}


def fits(case: Case) -> bool:
    return case["world"] % math.prod(case["tp_pp"]) == 0


def all_gradients(cases: list[Case]) -> list[dict[str, Any]]:
    made: Groups = {}
    return [gradients_of(case, made) for case in cases]


def in_one_world(cases: list[Case], timeout_s: float = 240) -> Iterator[tuple[Case, list[dict[str, Any]]]]:
    """Run cases of one world; yield each with what its ranks got."""
    ranks = run_world(cases[0]["world"], all_gradients, cases, timeout_s=timeout_s)
    for number, case in enumerate(cases):
        yield case, [of_rank[number] for of_rank in ranks]


def in_the_suite(case: Case) -> bool:
    """Without rings of eight: eight processes are slow on two cores, and tests of worlds of four have rings of four."""
    return fits(case) and (case["world"], case["tp_pp"]) != (8, (1, 1))


def test_float64_gradients_on_every_mesh_are_those_of_one_process() -> None:
    """A covering set of all factors. Every second case validates after its step."""
    cases = [case | {"validates": number % 2 == 0} for number, case in enumerate(pairwise(FACTORS, in_the_suite))]
    unequal, moved, teams, rings = False, False, False, set[str]()
    for world in FACTORS["world"]:
        for case, found in in_one_world([case for case in cases if case["world"] == world]):
            compare(case, found)
            mesh = Mesh.of(world, settings_of(case, world).parallel)
            unequal |= mesh.pp > 1 and len(set(found[0]["counts"])) > 1
            rings |= {axis for axis in ("tp", "pp") if getattr(mesh, axis) > 1 and found[0]["degree"] > 1}
            teams |= case["slices"] > 1 and found[0]["team"] > 1
            assert not any(one["kept"] for one in found), "K,V of slices are kept after the step"
            moved |= mesh.pp > 1 and any(one["moved"] for one in found)
    assert unequal, "no pipeline had unequal numbers of micro-batches: the test shows too little"
    assert moved, "no pipeline offloaded anything: the test shows too little"
    assert teams, "no slice had a team: the test shows too little"
    assert rings == {"tp", "pp"}, "no rings beside tp or pp: the test shows too little"


MESHES = [
    (world, tp_pp)
    for world, tp_pp in product(FACTORS["world"], FACTORS["tp_pp"])
    if fits({"world": world, "tp_pp": tp_pp})
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world", "tp_pp"), MESHES)
def test_float64_gradients_of_all_combinations(world: int, tp_pp: tuple[int, int]) -> None:
    """2,016 cases on 14 meshes."""
    cases = every(
        FACTORS
        | {"world": [world], "tp_pp": [tp_pp], "mlp_tile": [0], "balance": [None, "loss"]}
        | {"slices": [0], "validates": [True], "qwen3": [False]}
    )
    errors = list[float]()
    for start in range(0, len(cases), 72):  # results are kept until their world ends
        errors += [compare(case, found) for case, found in in_one_world(cases[start : start + 72], 550)]
    print(f"world {world}, tp and pp {tp_pp}: {len(errors)} cases, largest error {max(errors):.1e}")


@pytest.mark.slow
@pytest.mark.parametrize(("world", "tp_pp"), MESHES)
@pytest.mark.parametrize("slices", [1, 2, 3, 7])
def test_float64_gradients_of_slices_on_all_meshes(slices: int, world: int, tp_pp: tuple[int, int]) -> None:
    """24 cases for each number of slices and mesh: every recompute mode, ties, offload and experts."""
    fixed = {
        "world": [world],
        "tp_pp": [tp_pp],
        "planner": ["adaptive"],
        "mlp_tile": [0],
        "offload": [0.0, 0.5],
        "slices": [slices],
        "balance": [None, "loss"],
        "qwen3": [True],
        "validates": [True],
    }
    errors = [compare(case, found) for case, found in in_one_world(every(FACTORS | fixed), 550)]
    print(f"{slices} slices, world {world}, tp and pp {tp_pp}: {len(errors)} cases, largest error {max(errors):.1e}")


def all_through_deepspeed() -> list[dict[str, Any]]:
    made: Groups = {}
    return [through_deepspeed(mesh, variant, made) for variant in VARIANTS for mesh in variant.meshes]


def test_steps_through_deepspeed_on_every_mesh_are_those_of_one_process() -> None:
    """SGD with momentum, with clipping off and on. Copies of a parameter are equal to the last bit."""
    ranks, number = run_world(WORLD, all_through_deepspeed), -1
    for variant in VARIANTS:
        dtype, tied = variant.dtype, variant.tied
        settings = zero_settings((1, 1), variant)
        alone = whole_of(settings, torch.float32)
        start = (alone.bfloat16() if dtype == "bf16" else alone).double()
        expected, norms = steps_alone(start, settings, batches(), LR)
        end = {name: parameter.detach() for name, parameter in start.named_parameters()}
        if tied:
            expected["head.weight"], end["head.weight"] = expected["embedding.weight"], end["embedding.weight"]
        errors, table = [], parameters_of(zero_settings(variant.meshes[0], variant).model)
        for mesh in (Mesh(WORLD // (tp * pp), tp, pp, *ep) for tp, pp, *ep in variant.meshes):
            number += 1
            found = {rank: ranks[rank][number] for rank in range(WORLD)}
            worst, squares, count = 0.0, 0.0, 0
            for rank, one in found.items():
                place = mesh.place(rank)
                assert one["norms"] == found[0]["norms"], (variant, mesh, "ranks have different norms")
                assert one["norms"] == pytest.approx(norms, rel=1e-5 if dtype == "fp32" else 2e-2), (variant, mesh)
                for name, after in one["after"].items():
                    change = after - one["before"][name]
                    of_device = own_slice(table[name], expected[name], mesh, place)
                    worst = max(worst, change_error(name, change, of_device, len(norms)))
                    squares += float((after - own_slice(table[name], end[name], mesh, place)).square().sum())
                    count += after.numel()
            check_copies(found, mesh, tied, table)
            errors.append(worst if dtype == "fp32" else (squares / count) ** 0.5)
        # Errors of float32 grow with the depth of sums, not with the mesh.
        assert max(errors) <= (1.5 if dtype == "fp32" else 2) * errors[0], (variant, errors)


def check_copies(found: dict[int, dict[str, Any]], mesh: Mesh, tied: bool, table: Parameters) -> None:
    """What several devices store must be equal to the last bit: norms over tp, all over HDP, a tied weight's copies."""
    for rank, one in found.items():
        for other in mesh.members(rank, "experts"):
            assert equal(one["after"], found[other]["after"]), f"HDP ranks of {rank}, {mesh}"
        for other in mesh.members(rank, "hdp"):
            ours, theirs = (
                {name: value for name, value in found[which]["after"].items() if not table[name].stacked}
                for which in (rank, other)
            )
            assert equal(ours, theirs), f"HDP ranks of {rank}, {mesh}"
        norms = [name for name in one["after"] if table[name].split is None]
        for other in mesh.members(rank, "tp"):
            for name in norms:
                assert torch.equal(one["after"][name], found[other]["after"][name]), f"{name} of {rank}, {mesh}"
        if tied and mesh.pp > 1 and mesh.place(rank).pp == 0:
            last = found[mesh.members(rank, "pp")[-1]]["after"]["head.weight"]
            assert torch.equal(one["after"]["embedding.weight"], last), f"tied weight of {rank}, {mesh}"


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())
