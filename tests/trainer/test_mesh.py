"""A run with tensor, pipeline or expert parallelism logs the losses and norms of one without, and draws its stages."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.launch.run import train
from engine.report.run import Trace, read_run
from tests.helpers import family
from tests.planner.executor import order_of
from tests.trainer.worlds import in_worlds

pytestmark = pytest.mark.world

STEPS = 4
SMALL = [
    *("recipe=quickstart", "context=192", "capacity=192", "batch_tokens=384", "dtype=fp32", f"run.steps={STEPS}"),
    *("model.layers=4", "model.hidden=36", "model.heads=2", "model.ffn=50", "optimizer.warmup_steps=2"),
    *("data.validation_share=0.2", "data.validation_tokens=256", "run.validate_every=2", "run.checkpoint_every=100"),
]
MESHES = {
    "tp 2": (2, ["parallel.tp=2"]),
    "pp 2": (2, ["parallel.pp=2", "parallel.stages=[3,1]"]),
    "tp 2, pp 2, tied": (4, ["parallel.tp=2", "parallel.pp=2", "model.tied=true", *family(False, qwen3=True)]),
    "pp 2, rings of 2": (4, ["parallel.pp=2", "capacity=96"]),
    "ep 2": (2, ["parallel.ep=2", "capacity=96", "model.experts=4", "model.top_k=2", *family(True, qwen3=True)]),
    "pp 4, micro-batches of half the size": (4, ["parallel.pp=4", "context=96", "capacity=96"]),
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


def config_of(out: Path, data: Path, ranks: int, *more: str) -> Config:
    texts = [f"data.path={data}", "data.pattern=*.txt"]
    return load([*SMALL, *texts, f"cluster.ranks_per_node={ranks}", f"run.out={out}", *more])


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_changes_no_loss(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ranks, mesh = MESHES[name]
    in_worlds(monkeypatch, STEPS)
    same = [key for key in mesh if key.startswith(("model.", "context"))]
    alone, split = config_of(tmp_path / "alone", data, 1, *same), config_of(tmp_path / "split", data, ranks, *mesh)
    for config in (alone, split):
        train(config, say=lambda line: None)
    expected = logged(tmp_path / "alone")
    assert len(set(expected)) == 2 * STEPS + STEPS // 2
    assert logged(tmp_path / "split") == pytest.approx(expected, rel=1e-5)
    run = read_run(tmp_path / "split")
    assert run.trace is not None
    assert {span.stage for span in run.trace.spans} == set(range(split.parallel.pp))
    assert_simulated_order(run.trace)


def assert_simulated_order(trace: Trace) -> None:
    """Each stage ran its passes in the order of the reference; adjacent passes of a micro-batch are one span."""
    plan, stages = trace.plan, trace.plan.stages
    lines = {(span.rank, span.stage) for span in trace.spans}
    assert lines == {(rank, stage) for rank in range(plan.ranks) for stage in range(stages)}
    for rank, stage in lines:
        gangs = [micro.gang for micro in plan.of_rank(rank)]
        order = order_of(plan, len(gangs), stage)
        spans = [span for span in trace.spans if (span.rank, span.stage) == (rank, stage)]
        ran = [int(plan.gang[span.micro_batch]) for span in sorted(spans, key=lambda span: span.start_s)]
        simulated = [gang for gang, _ in groupby(gangs[place] for place, _ in order)]
        assert ran == simulated


def test_a_run_continues_on_other_meshes_and_in_other_stages(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied = "model.tied=true"
    chain = [
        (4, ["parallel.tp=2", "parallel.pp=2"]),
        (1, ["zero.stage=3"]),
        (2, ["parallel.pp=2"]),
        (2, ["parallel.tp=2", "zero.stage=3"]),
    ]
    in_worlds(monkeypatch, STEPS)
    train(config_of(tmp_path / "alone", data, 1, tied), say=lambda line: None)
    for step, (ranks, mesh) in enumerate(chain, start=1):
        in_worlds(monkeypatch, step)
        train(config_of(tmp_path / "run", data, ranks, tied, *mesh), say=lambda line: None)
    assert logged(tmp_path / "run") == pytest.approx(logged(tmp_path / "alone"), rel=1e-5)
