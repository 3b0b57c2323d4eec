from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load, read_resolved
from engine.cost.calibration import NEVER_S
from engine.cost.model import machine
from engine.data.opening import open_run
from engine.data.order import ORDER
from engine.data.overview import Corpora
from engine.data.steps import Cursor, Steps
from engine.errors import ConfigError, MemoryFitError
from engine.hardware.prepare import LONGEST, LONGEST_REFERENCE, longest, measuring, most_tokens, write_folder
from engine.job import Job
from engine.run.compatibility import read_fingerprints
from engine.run.folder import RunFolder
from tests.refusals import refused

PROCESS = 520  # MiB of a device that are no tensors


def test_the_recipes_own_model_is_measured_on_this_machine(tmp_path: Path) -> None:
    recipe = load(["cluster.calibration=gone.json", "zero.stage=2", "planner=adaptive", "recompute=layer"])
    ours = measuring(recipe, 2, tmp_path)
    assert ours.model == recipe.model
    assert (ours.cluster.name, ours.cluster.nodes, ours.cluster.ranks_per_node) == ("local", 1, 2)
    assert ours.cluster.calibration is None, "measurements must not depend on an older calibration"
    assert (ours.zero.stage, ours.recompute) == (1, "none")


def test_a_large_model_is_cut_to_few_layers(tmp_path: Path) -> None:
    assert measuring(load(["model.layers=32"]), 2, tmp_path).model.layers == 4


@pytest.mark.parametrize(
    "mesh", [["parallel.tp=2", "parallel.pp=2"], ["model.family=mixtral", "model.experts=4", "parallel.ep=4"]]
)
def test_one_rank_measures_for_any_mesh(tmp_path: Path, mesh: list[str]) -> None:
    parallel = measuring(load(["cluster.ranks_per_node=4", *mesh]), 1, tmp_path).parallel
    assert (parallel.tp, parallel.pp, parallel.ep) == (1, 1, 1)


def test_layers_that_do_not_fit_are_cut_too(tmp_path: Path) -> None:
    whole = measuring(load([]), 2, tmp_path)
    least = next(size for size in range(1, 64) if fits(f"{PROCESS + size}M", tmp_path))
    cut = measuring(load([f"cluster.device_memory={PROCESS + least}M"]), 2, tmp_path)
    assert cut.model.layers < whole.model.layers
    assert most_tokens(Job(cut)) >= 1024
    assert longest(cut, "cpu", "fused_cpu") < longest(whole, "cpu", "fused_cpu") == LONGEST["cpu"]


def fits(memory: str, folder: Path) -> bool:
    try:
        measuring(load([f"cluster.device_memory={memory}"]), 2, folder)
    except MemoryFitError:
        return False
    return True


def test_a_model_whose_layers_do_not_fit_is_refused(tmp_path: Path) -> None:
    with refused(MemoryFitError, "cluster.device_memory"):
        measuring(load(["cluster.device_memory=1M"]), 2, tmp_path)


def test_what_cannot_be_trained_cannot_be_measured(tmp_path: Path) -> None:
    with refused(ConfigError, "dtype=fp64"):
        measuring(load(["dtype=fp64"]), 2, tmp_path)
    with refused(ConfigError, "model.vocab=100"):
        write_folder(measuring(load(["model.vocab=100"]), 2, tmp_path), RunFolder(tmp_path))


def test_the_longest_is_a_power_of_two_that_fits(tmp_path: Path) -> None:
    ours = measuring(load([f"cluster.device_memory={PROCESS + 24}M"]), 2, tmp_path)
    found = longest(ours, "cpu", "fused_cpu")
    assert found & (found - 1) == 0
    assert found <= most_tokens(Job(ours)) < 2 * found


def test_attention_on_a_gpu_is_measured_up_to_64k_with_the_kernel_of_training(tmp_path: Path) -> None:
    """Only the reference is cut: it stores all scores, 2 x 64K x 64K x 4 bytes a head."""
    ours = measuring(load(["recipe=h200-1b-8k"]), 1, tmp_path)
    assert longest(ours, "cuda", "cudnn") == 64 * 1024
    assert longest(ours, "cuda", "reference") == LONGEST_REFERENCE == 4096


def test_a_rank_can_start_from_the_folder(tmp_path: Path) -> None:
    ours = measuring(load([]), 2, tmp_path)
    folder = RunFolder(tmp_path)
    write_folder(ours, folder)
    found = read_resolved(folder.resolved)
    assert machine(found).plan_build_s == NEVER_S, "a repeated shape keeps its kernel"
    without = found.model_copy(update={"cluster": found.cluster.model_copy(update={"calibration": None})})
    assert without == ours
    steps = Steps(open_run(folder, found).corpora, found)
    step = steps.next(Cursor())
    assert step is not None
    table, after = step
    assert len(table) == 2 and set(table.length.tolist()) == {1001}, "a step gives each of two ranks a document"
    assert steps.validation(ORDER) == {} and after.tokens == table.length.sum()
    assert Corpora(found).fingerprints == read_fingerprints(folder)
