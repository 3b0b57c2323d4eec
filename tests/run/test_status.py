from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engine.config.load import load
from engine.config.resolved import resolved_yaml
from engine.errors import ConfigError
from engine.files import LOCK, locked
from engine.launch.agents import ranks
from engine.run import launches, metrics
from engine.run.folder import RunFolder
from engine.run.status import differences, is_locked, log_tail, losses, runs_in, status
from tests.permissions import locked_out
from tests.refusals import refused


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
    assert found.checkpoint is None and found.causes == {} and found.changed is None


def test_a_run_that_is_finished_or_ended_by_its_data(tmp_path: Path) -> None:
    found = status(made(tmp_path / "a", losses=(3.0, 2.0, 1.0), validation_loss=1.5).root)
    assert (found.state, found.step, found.loss, found.validation_loss) == ("finished", 3, 1.0, 1.5)
    assert (found.tokens, found.tokens_per_s) == (300, 25.0)  # the median without the first step
    assert status(made(tmp_path / "b", losses=(3.0,), ended="all documents were used").root).state == "finished"


def test_the_rank_that_failed_first_is_first(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", losses=(3.0,))
    failed(folder, 0, 20.0, "the connection to rank 1 was lost")
    failed(folder, 1, 10.0, "out of memory")
    (folder.logs / "rank-2.error.json").write_text("{")
    found = status(folder.root)
    assert found.state == "failed"
    assert list(found.causes.items()) == [(1, "out of memory"), (0, "the connection to rank 1 was lost")]


def test_a_run_failed_if_its_last_start_did(tmp_path: Path) -> None:
    """A rank that a signal killed has written no cause."""
    folder = made(tmp_path / "a", losses=(3.0,))
    found = list[tuple[str, str | None]]()
    for outcome in ("rank 0 was killed by SIGKILL", launches.STOPPED, None, "rank 1 failed", ""):
        launches.begin(folder.launches, 1, 2, ["localhost"])
        if outcome is not None:
            launches.end(folder.launches, outcome)
        now = status(folder.root)
        found.append((now.state, now.cause))
    killed, again = ("failed", "rank 0 was killed by SIGKILL"), ("failed", "rank 1 failed")
    assert found == [killed, ("stopped", None), ("stopped", None), again, ("stopped", None)]


def test_a_run_that_was_asked_to_stop_did_not_fail(tmp_path: Path) -> None:
    """Even if ranks have written that others were gone."""
    folder = made(tmp_path / "a", losses=(3.0,))
    failed(folder, 1, 10.0, "the connection to rank 0 was lost")
    launches.begin(folder.launches, 1, 2, ["localhost"])
    launches.end(folder.launches, str(ranks.stopped_on_request(folder, saved=True)))
    assert (status(folder.root).state, status(folder.root).causes) == ("stopped", {})


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


def test_a_lock_is_seen_that_the_kernel_does_not_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/locks lists no lock of another container or host."""
    (tmp_path / "locks").write_text("")
    monkeypatch.setattr("engine.run.status._LOCKS", tmp_path / "locks", raising=False)
    with locked(tmp_path / LOCK):
        assert is_locked(tmp_path / LOCK)


def test_a_look_at_the_lock_does_not_refuse_a_run_that_starts(tmp_path: Path) -> None:
    with (tmp_path / LOCK).open("x") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        look = threading.Thread(target=lambda: (time.sleep(0.02), fcntl.flock(file, fcntl.LOCK_UN)))
        look.start()
        with locked(tmp_path / LOCK):
            pass
        look.join()


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


def test_a_folder_that_may_not_be_looked_into_hides_no_other(tmp_path: Path) -> None:
    made(tmp_path / "a"), made(tmp_path / "b")
    with locked_out(tmp_path / "b"):
        assert sorted(path.name for path in runs_in(tmp_path)) == ["a", "b"]


def test_what_is_no_run(tmp_path: Path) -> None:
    with refused(ConfigError, tmp_path):
        status(tmp_path)
    with refused(ConfigError, f"{tmp_path}/none"):
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
    with pytest.raises(ConfigError, match="has no log of this rank") as caught:
        log_tail(folder.root, 1, 2)
    assert (caught.value.problems[0].key, caught.value.problems[0].hint) == ("--rank 1", "choose 0, 2, 10")
    folder.log(1).write_text("")
    folder.log(10).unlink()
    with pytest.raises(ConfigError) as caught:
        log_tail(folder.root, 3, 2)
    assert caught.value.problems[0].hint == "choose 0 to 2"


def test_without_a_rank_the_logs_are_those_of_the_nodes(tmp_path: Path) -> None:
    """ssh writes there why no rank could start."""
    folder = made(tmp_path / "a")
    folder.logs.mkdir()
    folder.node_log(0).write_text("")
    folder.node_log(1).write_text("ssh: Could not resolve hostname\n")
    expected = {"node": 1, "path": str(folder.node_log(1)), "lines": ["ssh: Could not resolve hostname"]}
    assert log_tail(folder.root, None, 2) == [expected]
    with pytest.raises(ConfigError) as caught:
        log_tail(folder.root, 0, 2)
    assert caught.value.problems[0].hint == f"no rank has started; see `bytescale runs logs {folder.root}`"
    folder.log(0).write_text("")
    assert log_tail(folder.root, None, 2) == [{"rank": 0, "path": str(folder.log(0)), "lines": []}]


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
