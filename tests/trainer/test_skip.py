"""What a run does with steps whose loss or gradients are not finite (run.on_nan), in a world of two ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.cluster.mesh import Mesh
from engine.config.load import load, read_resolved
from engine.data.history import History
from engine.launch import outcome, supervise
from engine.launch.run import train
from engine.parallel.groups import Groups
from engine.run.checkpoints import newest_first, read_state
from engine.run.folder import RunFolder
from engine.trainer.finite import DivergedError
from engine.trainer.loop import Trainer
from tests.trainer.worlds import texts
from tests.world import control, run_world

pytestmark = pytest.mark.world

SMALL = [
    *("recipe=quickstart", "context=192", "batch_tokens=384", "capacity=96", "run.steps=6", "data.validation_share=0"),
    *("model.layers=1", "model.hidden=36", "model.heads=2", "model.kv_heads=1", "model.ffn=50", "run.chaos=true"),
    *("model.family=mixtral", "model.experts=3", "model.top_k=2", "balance.by=bias", "run.checkpoint_every=2"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts(tmp_path_factory.mktemp("data"), 60)


def on_rank(root: Path, checkpoint: Path | None, last: int, spoilt: tuple[int, ...]) -> str:
    """Train up to step `last`; in spoilt steps a loss of rank 1 is NaN. Returns why the run diverged, if it did."""
    folder = RunFolder(root)
    config = read_resolved(folder.resolved)
    rings = dist.new_group(backend="gloo")
    mesh = Mesh.of(dist.get_world_size(), config.parallel)
    trainer = Trainer(folder, config, Groups(dist.get_rank(), mesh, torch.device("cpu"), rings, control()))
    forward = trainer.engine.forward

    def spoils(*given: Any) -> torch.Tensor:
        bad = dist.get_rank() == 1 and trainer.step + 1 in spoilt
        return forward(*given) * (math.nan if bad else 1)

    trainer.engine.forward = spoils  # type: ignore[method-assign]
    trainer.begin(checkpoint)
    message = ""
    try:
        trainer.run(lambda: trainer.step >= last)
    except DivergedError as error:
        message = str(error)
    trainer.data.close()
    return message


def run(
    out: Path, data: Path, monkeypatch: pytest.MonkeyPatch, spoilt: tuple[int, ...], *more: str, last: int = 6
) -> tuple[list[dict[str, Any]], str, list[str]]:
    """Start or resume a run; return its metrics, why it diverged, and what the launcher said."""
    found, said = list[str](), list[str]()

    def run_ranks(commands: object, folder: RunFolder, tick: Any, *rest: object) -> None:
        checkpoint = newest_first(folder.checkpoints)[:1]
        messages = run_world(2, on_rank, folder.root, *(checkpoint or [None]), last, spoilt)
        assert messages[0] == messages[1], "all ranks agree"
        found.append(messages[0])
        tick()

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    monkeypatch.setattr(outcome, "write_page", lambda folder, say: None)  # a report takes as long as all steps
    places = [f"run.out={out}", f"data.path={data}", "data.pattern=*.txt"]
    train(load([*SMALL, *places, *more]), say=said.append)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return lines, found[0], said


def test_a_step_that_is_not_finite_is_skipped_and_a_resume_sees_the_same(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip = ["run.on_nan=skip", "run.max_skips=2"]
    whole, message, said = run(tmp_path / "whole", data, monkeypatch, (3, 4), *skip)
    assert message == "" and [line["step"] for line in whole] == [1, 2, 3, 4, 5, 6]
    assert [line.get("skipped") for line in whole] == [None, None, 1, 2, None, None]
    for line in whole[2:4]:
        assert line["loss"] is None and line["grad_norm"] is None and "cross_entropy" not in line
    assert any("1 step was skipped" in line and "--step 3` shows its documents" in line for line in said)
    parts = tmp_path / "parts"
    run(parts, data, monkeypatch, (3, 4), *skip, last=3)  # between the two skipped steps
    assert read_state(newest_first(parts / "checkpoints")[0]).skipped == 1
    resumed, _, _ = run(parts, data, monkeypatch, (3, 4), *skip)
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]
    assert [line.get("skipped") for line in resumed] == [line.get("skipped") for line in whole]


def test_one_more_stops_the_run_also_after_a_resume(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, skip = tmp_path / "run", ["run.on_nan=skip", "run.max_skips=1"]
    run(out, data, monkeypatch, (3, 4), *skip, last=3)
    lines, message, _ = run(out, data, monkeypatch, (3, 4), *skip)
    assert "step 4" in message and "1 update before it" in message
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_the_run_stops_with_the_documents_of_the_step(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    lines, message, _ = run(out, data, monkeypatch, (4,))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert "step 4" in message
    of_rank_1 = {one.document.id for one in History.of(out).trace_step(4) if 1 in one.ranks}
    named = message.partition("documents ")[2].partition(" and ")[0].split(", ")
    assert named != [""] and set(named) <= of_rank_1, "those of rank 1, whose loss was not finite"
    again, message, _ = run(out, data, monkeypatch, (4,), "run.on_nan=skip")  # the way out, in the same folder
    assert message == "" and [line.get("skipped") for line in again] == [None, None, None, 1, None, None]
