from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.config.load import load
from engine.config.resolved import resolved_yaml
from engine.errors import ConfigError, RunFolderError
from engine.files import LOCK, locked
from engine.run import metrics
from engine.run.folder import RunFolder
from engine.run.status import differences, is_locked, log_tail, losses, runs_in, status


def made(root: Path, *overrides: str, losses: tuple[float, ...] = (), **last: Any) -> RunFolder:
    """Make a run folder with some steps; `last` is added to the line of the last one."""
    folder = RunFolder(root)
    root.mkdir(parents=True)
    config = load(["run.steps=3", f"run.out={root}", *overrides])
    folder.resolved.write_text(resolved_yaml(config), encoding="utf-8")
    for step, loss in enumerate(losses, start=1):
        line = {"step": step, "loss": loss, "tokens": 100, "tokens_per_s": 10.0 * step}
        metrics.append(folder.metrics, line | (last if step == len(losses) else {}))
    return folder


def failed(folder: RunFolder, rank: int, at: float, message: str) -> None:
    folder.logs.mkdir(exist_ok=True)
    folder.error(rank).write_text(json.dumps({"message": message, "time": at}))


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    found = status(made(tmp_path / "a").root)
    assert (found.state, found.step, found.steps, found.loss, found.tokens) == ("stopped", 0, 3, None, 0)
    assert found.checkpoint is None and found.causes == {}


def test_a_run_that_is_finished_or_ended_by_its_data(tmp_path: Path) -> None:
    found = status(made(tmp_path / "a", losses=(3.0, 2.0, 1.0), validation_loss=1.5).root)
    assert (found.state, found.step, found.loss, found.validation_loss) == ("finished", 3, 1.0, 1.5)
    assert (found.tokens, found.tokens_per_s) == (300, 30.0)
    assert status(made(tmp_path / "b", losses=(3.0,), ended="all documents were used").root).state == "finished"


def test_the_rank_that_failed_first_is_first(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", losses=(3.0,))
    failed(folder, 0, 20.0, "the connection to rank 1 was lost")
    failed(folder, 1, 10.0, "out of memory")
    (folder.logs / "rank-2.error.json").write_text("{")
    found = status(folder.root)
    assert found.state == "failed"
    assert list(found.causes.items()) == [(1, "out of memory"), (0, "the connection to rank 1 was lost")]


def test_a_locked_folder_is_running(tmp_path: Path) -> None:
    """Also if an earlier start failed; and looking does not take the lock from a run that starts."""
    folder = made(tmp_path / "a", losses=(3.0,))
    failed(folder, 0, 1.0, "earlier")
    lock = folder.root / LOCK
    assert not is_locked(lock)
    with locked(lock):
        assert status(folder.root).state == "running" and status(folder.root).causes == {}
    assert lock.exists() and not is_locked(lock)
    assert status(folder.root).state == "failed"


def test_the_newest_checkpoint(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", losses=(3.0,))
    for step in (1, 2):
        (folder.checkpoints / f"step-{step:08}").mkdir(parents=True)
    assert status(folder.root).checkpoint == str(folder.checkpoints / "step-00000002")


def test_runs_are_listed_by_their_last_change(tmp_path: Path) -> None:
    for at, name in enumerate(("b", "a", "c")):
        os.utime(made(tmp_path / name).root, (at, at))
    (tmp_path / "no-run").mkdir()
    assert [path.name for path in runs_in(tmp_path)] == ["c", "a", "b"]


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        status(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        runs_in(tmp_path / "none")


def test_logs(tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    assert log_tail(folder.root, None, 2) == []
    folder.logs.mkdir()
    for rank in (0, 2, 10):
        folder.log(rank).write_text("".join(f"{rank}: line {line}\n" for line in range(3)))
    found = log_tail(folder.root, None, 2)
    assert [one["rank"] for one in found] == [0, 2, 10]
    assert found[1] == {"rank": 2, "path": str(folder.log(2)), "lines": ["2: line 1", "2: line 2"]}
    assert log_tail(folder.root, 10, 9)[0]["lines"] == [f"10: line {line}" for line in range(3)]
    with pytest.raises(RunFolderError, match="has no log of rank 1"):
        log_tail(folder.root, 1, 2)


def test_differences_are_of_meaning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    here = ["data=folder", "run.out=a", "data.path=docs"]
    there = ["data=folder", "run.out=b", f"data.path={tmp_path / 'docs'}", "optimizer.lr=0.1"]
    assert differences([load(here), load(there)]) == {"optimizer.lr": [0.004, 0.1]}
    assert differences([load(here)] * 3) == {}
    sources = load(["data=folder", "data.sources.web.path=docs", "data.mix={web: 1}"])
    assert differences([load(here), sources])["data.sources.web.path"] == [None, "docs"]


def test_losses_are_compared_at_the_last_step_that_all_have(tmp_path: Path) -> None:
    one, two = made(tmp_path / "a", losses=(3.0, 2.0, 1.0)), made(tmp_path / "b", losses=(3.5, 2.5))
    assert losses([one.root, two.root]) == (2, [2.0, 2.5])
    assert losses([one.root, made(tmp_path / "c").root]) == (None, [None, None])
