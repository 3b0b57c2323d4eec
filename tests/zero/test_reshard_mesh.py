"""A checkpoint of one mesh continues on another: masters and moments are copied, so they are equal to the last bit.

An export of the same states has the same bytes, whichever mesh saved them.
"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.config.load import resolved_yaml
from engine.config.schema import Config
from engine.data.inputs import rank_inputs
from engine.family.families import parameters_of
from engine.family.parameters import Parameters
from engine.job import Job
from engine.planner.make import plan_step
from engine.run import checkpoints
from engine.run.checkpoints import TrainState
from engine.run.compatibility import must_match
from engine.run.folder import RunFolder
from engine.trainer.export import export_weights
from engine.trainer.optimizer import build_optimizer
from engine.trainer.step import run_step
from engine.zero.states import SavedStates, model_weights
from tests.meshes import STEPS, WORLD, Groups, Variant, batches, build, zero_settings
from tests.run.damage import TOKEN
from tests.world import Named, run_world
from tests.zero.saving import save

pytestmark = pytest.mark.world

# (tp, pp, ep) and ZeRO stage, one after the other; a step is trained on each, and its checkpoint continues on the next.
Chain = list[tuple[tuple[int, ...], int]]
CHAIN: Chain = [((1, 1), 1), ((2, 1), 1), ((2, 2), 1), ((1, 2), 1), ((2, 1), 3), ((1, 1), 2), ((2, 2), 1), ((1, 1), 3)]
OF_SHARES: Chain = [
    ((1, 1, 2), 1),
    ((2, 1), 1),
    ((1, 1, 4), 2),
    ((1, 1), 3),
    ((1, 1, 2), 2),
    ((1, 1, 4), 1),
    ((2, 2), 1),
]
VARIANTS = {
    "bf16": Variant("bf16", tied=False, clip=0.4, qwen3=True),
    "experts": Variant("fp32", tied=True, clip=0.4, balance="bias"),
    "bf16 shares": Variant("bf16", tied=False, clip=0.4, balance="loss", shared=True, qwen3=True),
}
MORE = {  # `pytest -m slow` runs them
    "tied": Variant("fp32", tied=True, clip=0.4),
    "shares": Variant("fp32", tied=True, clip=0.4, balance="bias", shared=True),
}


def chain_of(variant: Variant) -> Chain:
    return OF_SHARES if variant.shared else CHAIN


def states_of(folder: Path, table: Parameters) -> dict[str, Tensor]:
    """All states of a checkpoint by parameter and key, whole."""
    saved, found = SavedStates(folder, table), {}
    for name, shape in saved.shapes.items():
        for key in saved.keys(name):
            found[f"{name} {key}"] = torch.zeros(shape.numel())
            saved.read(name, key, 0, found[f"{name} {key}"])
    return found


def chain(variant: Variant, root: str) -> list[dict[str, Any]]:
    """Load, save again, train a step, and save: on each mesh of the chain. Each also saves the states of the first."""
    from engine.zero.engine import ZeroEngine

    made: Groups = {}
    found = []
    for number, (mesh, stage) in enumerate(chain_of(variant)):
        settings = zero_settings(mesh, variant._replace(stage=stage))
        adam = settings.optimizer.model_copy(update={"name": "adamw", "betas": (0.9, 0.99)})
        settings = settings.model_copy(update={"optimizer": adam})
        model, context, axes = build(settings, torch.float32, made)
        engine = ZeroEngine(model, build_optimizer(model, settings.optimizer, axes.mesh.ep), settings, axes)
        if number:
            engine.load(Path(root) / "trained-0")
            save_run(engine, settings, RunFolder(Path(root) / f"first-{number}"))
            engine.load(Path(root) / f"trained-{number - 1}")
            save(engine, Path(root) / f"loaded-{number}")
        table, reader = batches()[number % STEPS]
        plan = plan_step(table.length, Job(settings).settings)
        backward = partial(engine.backward, step_loss_tokens=int(table.loss_tokens.sum()))
        run_step(plan, engine.forward, backward, partial(rank_inputs, reader, table), context)
        found.append({"norm": engine.step(1e-3)})
        save(engine, Path(root) / f"trained-{number}")
        if not number:
            save_run(engine, settings, RunFolder(Path(root) / "first-0"))
        dist.barrier()
    return found


def save_run(engine: Any, settings: Config, run: RunFolder) -> None:
    """Save a checkpoint as a run does, with what `export_weights` needs."""
    mesh = {"tp": settings.parallel.tp, "pp": settings.parallel.pp}
    state = TrainState(1, {}, WORLD, {"data": "f"}, must_match(settings), mesh=mesh)
    write_each = engine.snapshot(copies=False).write_each
    checkpoints.write(run.checkpoints, state, dist.get_rank(), write_each, TOKEN, Named(run.root.name))
    if dist.get_rank() == 0:
        run.resolved.write_text(resolved_yaml(settings))
    dist.barrier()


@pytest.mark.parametrize("name", [*VARIANTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_a_checkpoint_of_one_mesh_continues_on_another(name: str) -> None:
    variant = (VARIANTS | MORE)[name]
    meshes, table = chain_of(variant), parameters_of(zero_settings((1, 1), variant).model)
    with tempfile.TemporaryDirectory() as root:
        ranks = run_world(WORLD, chain, variant, root)
        assert all(rank == ranks[0] for rank in ranks), "all ranks have the same norms"
        for before, after in pairwise(range(len(meshes))):
            old, new = (states_of(Path(root) / name, table) for name in (f"trained-{before}", f"loaded-{after}"))
            for key, value in (old | new).items():
                # A tied model has one weight, or a copy of it on the last stage.
                source = key if key in old else key.replace("head.weight", "embedding.weight")
                target = key if key in new else key.replace("head.weight", "embedding.weight")
                assert torch.equal(new[target], old[source]), (meshes[after], key)
                assert value.abs().sum() > 0
            ours, theirs = (
                model_weights(Path(root) / f"{kind}-{number}", table)
                for kind, number in (("trained", before), ("loaded", after))
            )
            for key in ours.keys() & theirs.keys():
                wide = torch.bfloat16 if variant.dtype == "bf16" else torch.float32
                assert torch.equal(ours[key]().to(wide), theirs[key]().to(wide)), (meshes[after], key)
        check_exports(Path(root), meshes)


def check_exports(root: Path, meshes: Chain) -> None:
    """In the run's dtype and in fp32, in several shards."""
    for dtype in (None, "fp32"):
        expected: dict[str, bytes] = {}
        for number, (mesh, stage) in enumerate(meshes):
            out = root / f"export-{dtype}-{number}"
            export_weights(root / f"first-{number}", out, dtype, 20_000, say=lambda line: None)
            found = {path.name: path.read_bytes() for path in out.iterdir()}
            expected = expected or found
            assert len(found) > 3 and found.keys() == expected.keys(), (mesh, stage)
            assert not [name for name in found if found[name] != expected[name]], (mesh, stage, dtype)
