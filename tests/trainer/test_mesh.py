"""A run with tensor and pipeline parallelism logs the losses and the norms of a run without, and draws its stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config.load import load
from engine.launch.run import train
from engine.report.run import read_run
from tests.trainer.worlds import in_worlds

pytestmark = pytest.mark.world

STEPS = 4
SMALL = [
    *("recipe=quickstart", "context=192", "capacity=192", "batch_tokens=384", "dtype=fp32", f"run.steps={STEPS}"),
    *("model.layers=3", "model.hidden=36", "model.heads=2", "model.ffn=50", "optimizer.warmup_steps=2"),
    *("data.validation_share=0.2", "data.validation_tokens=256", "run.validate_every=2", "run.checkpoint_every=100"),
]
MESHES = {
    "tp 2": (2, ["parallel.tp=2"]),
    "pp 2": (2, ["parallel.pp=2", "parallel.stages=[2,1]"]),
    "tp 2, pp 2, tied": (4, ["parallel.tp=2", "parallel.pp=2", "model.tied=true"]),
    "pp 2, rings of 2": (4, ["parallel.pp=2", "capacity=96"]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(16):
        (folder / f"{number}.txt").write_text(f"{number} documents of some length. " * (1 + number * 7 % 11))
    return folder


def logged(out: Path) -> list[float]:
    """Loss, norm and validation loss of each step that has them."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines for key in ("loss", "grad_norm", "validation_loss") if key in line]


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_changes_no_loss(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ranks, mesh = MESHES[name]
    in_worlds(monkeypatch, STEPS)
    given = [*SMALL, f"data.path={data}", "data.pattern=*.txt"]
    tied = [key for key in mesh if "tied" in key]
    alone = load([*given, *tied, "cluster.ranks_per_node=1", f"run.out={tmp_path / 'alone'}"])
    split = load([*given, *mesh, f"cluster.ranks_per_node={ranks}", f"run.out={tmp_path / 'split'}"])
    for config in (alone, split):
        train(config, say=lambda line: None)
    expected = logged(tmp_path / "alone")
    assert len(set(expected)) == 2 * STEPS + STEPS // 2
    assert logged(tmp_path / "split") == pytest.approx(expected, rel=1e-5)
    run = read_run(tmp_path / "split")
    assert run.trace is not None
    assert {span.stage for span in run.trace.spans} == set(range(split.parallel.pp))
