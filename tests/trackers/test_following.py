"""A tracker that fails, in every way that a library can, costs one warning, and never the run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.control.signals import STOP_SIGNALS
from engine.run.folder import RunFolder
from engine.run.metrics import cut_back
from engine.trackers import following as module
from engine.trackers.following import following
from tests.trackers.samples import ROOT, finish_steps, line, run_folder

pytestmark = pytest.mark.long

Fake = Callable[..., Path]
_LIBRARY = """
import json, os, sys, time
out = {out!r}
{imported}
Settings = dict
class Run:
    def log(self, values, step):
        {log}
        print(json.dumps([step, values]), file=open(out, "a"))
    def finish(self):
        {finish}
        print("finished", file=open(out, "a"))
def init(**settings):
    print("printed by the library")
    {init}
    return Run()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A function that replaces wandb by a library that executes what it is given; returns the file that it writes."""

    def make(imported: str = "", init: str = "", log: str = "", finish: str = "") -> Path:
        folder, out = tmp_path / "fake", tmp_path / "written"
        folder.mkdir()
        parts = {"imported": imported, "init": init or "pass", "log": log or "pass", "finish": finish or "pass"}
        (folder / "wandb.py").write_text(_LIBRARY.format(out=str(out), **parts))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
        out.touch()
        return out

    return make


def follow(
    folder: RunFolder, steps: int, *names: str, until: Callable[[list[str]], bool] = lambda said: True
) -> list[str]:
    """Finish some steps of a run with trackers; return what is said.

    The last step takes until `until`, called with what has been said so far, is true.
    """
    said, seen = list[str](), list[int]()
    with following(names, folder, said.append, lambda line: seen.append(line["step"])) as followed:
        for step in range(1, steps + 1):
            if step == steps:
                limit = time.monotonic() + 60
                while not until(said) and time.monotonic() < limit:
                    time.sleep(0.05)
                    followed(line(step - 1))
                    seen.pop()
            finish_steps(folder, step, step)
            followed(line(step))
    assert seen == list(range(1, steps + 1)), "training went on"
    assert children(folder) == [], "no process is left"
    return said


def children(folder: RunFolder) -> list[str]:
    """The command lines of the processes of trackers of a run that still run."""
    found = list[str]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace").replace("\0", " ")
            ours = f"-m engine.trackers {folder.root} " in text  # other tests run at the same time
            if ours and path.parent.joinpath("stat").read_text().split(") ")[1][0] != "Z":
                found.append(text)
        except OSError:
            continue
    return found


def test_a_tracker_that_works_gets_all_steps_and_nothing_is_said(tmp_path: Path, fake: Fake) -> None:
    out, folder = fake(), run_folder(tmp_path)
    assert follow(folder, 4, "wandb", "wandb") == []
    *steps, last = out.read_text().splitlines()
    assert [json.loads(text)[0] for text in steps] == [1, 2, 3, 4] and last == "finished"
    state = json.loads(folder.tracker("wandb").read_text())
    assert state["step"] == 4 and len(state["id"]) == 8
    assert "printed by the library" in folder.tracker_log("wandb").read_text()


def test_without_a_finished_step_nothing_is_started(tmp_path: Path, fake: Fake) -> None:
    folder = run_folder(tmp_path)
    fake()
    assert follow(folder, 0, "wandb") == []
    assert not folder.trackers.exists() and not folder.tracker_log("wandb").exists()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (
            {"imported": "raise ImportError('no such module')"},
            "ImportError: no such module; `pip install wa",
        ),
        ({"init": "raise PermissionError('API key')"}, "PermissionError: API key"),
        ({"log": "raise OSError(28, 'No space left on device')"}, "No space left on device"),
        ({"finish": "raise ConnectionError('unreachable')"}, "ConnectionError: unreachable"),
        ({"log": "os.abort()"}, "its process ended with code -6"),
        ({"init": "sys.exit(3)"}, "its process ended with code 3"),
        ({"init": "time.sleep(1000)"}, "it has not answered for 1 s"),
        ({"log": "time.sleep(1000)"}, "it has not answered for 1 s"),
        ({"finish": "time.sleep(1000)"}, "it did not end within 2 s, and was killed"),
    ],
    ids=lambda value: "-".join(next(iter(value.items())))[:24] if isinstance(value, dict) else "",
)
def test_each_failure_is_one_warning(
    broken: dict[str, str], reason: str, tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(**broken)
    hangs = next((name for name, code in broken.items() if code == "time.sleep(1000)"), None)
    # What does not hang may be slow on a busy machine.
    monkeypatch.setattr(module, "PATIENCE_S", 1.0 if hangs in ("init", "log") else 20.0)
    monkeypatch.setattr(module, "CLOSING_S", 2.0 if hangs == "finish" else 20.0)
    folder, began = run_folder(tmp_path), time.monotonic()

    def noticed(said: list[str]) -> bool:
        if hangs in ("init", "log"):
            return bool(said)
        return not children(folder) or time.monotonic() > began + 4

    (said,) = follow(folder, 3, "wandb", until=noticed)
    assert said.startswith("warning: the tracker wandb fails") and reason in said
    assert said.endswith(f"(details: {folder.tracker_log('wandb')})")
    assert time.monotonic() - began < 30


def test_a_tracker_that_fails_does_not_concern_another(tmp_path: Path, fake: Fake) -> None:
    pytest.importorskip("tensorboard")
    fake(init="raise RuntimeError('no')")
    folder = run_folder(tmp_path)
    (said,) = follow(folder, 3, "wandb", "tensorboard")
    assert "the tracker wandb fails and lacks 3 steps: RuntimeError: no" in said
    assert json.loads(folder.tracker("tensorboard").read_text())["step"] == 3


def test_a_signal_to_all_processes_of_a_job_does_not_end_a_tracker(tmp_path: Path, fake: Fake) -> None:
    """A scheduler sends it some time before the end; the last steps follow."""
    out, folder, said = fake(), run_folder(tmp_path, steps=2), list[str]()
    with following(["wandb"], folder, said.append, lambda line: None) as followed:
        followed(line(2))
        limit = time.monotonic() + 60
        while out.read_text().count("\n") < 2 and time.monotonic() < limit:
            time.sleep(0.05)
        (process,) = (one for one in psutil.Process().children() if str(folder.root) in one.cmdline())
        for number in STOP_SIGNALS:
            process.send_signal(number)
        finish_steps(folder, 3, 4)
        followed(line(4))
    assert [text[:2] for text in out.read_text().splitlines()] == ["[1", "[2", "[3", "[4", "fi"] and said == []


def test_a_run_that_goes_back_while_its_tracker_runs(tmp_path: Path, fake: Fake) -> None:
    """The metrics are cut back in place: steps that were written are not written again, later ones are."""
    out, folder, said = fake(), run_folder(tmp_path), list[str]()
    with following(["wandb"], folder, said.append, lambda line: None) as followed:
        finish_steps(folder, 1, 6)
        followed(line(6))
        limit = time.monotonic() + 60
        while out.read_text().count("\n") < 6 and time.monotonic() < limit:
            time.sleep(0.05)
        cut_back(folder.metrics, 2)
        finish_steps(folder, 3, 9)
        followed(line(9))
    *steps, _ = out.read_text().splitlines()
    assert [json.loads(text)[0] for text in steps] == list(range(1, 10)) and said == []


def test_after_its_launcher_was_killed_a_tracker_writes_the_last_steps_and_ends(tmp_path: Path, fake: Fake) -> None:
    out, folder = fake(), run_folder(tmp_path, steps=2)
    command = [sys.executable, "-m", "engine.trackers", str(folder.root), "wandb"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b'{"step": 0}\n'
        process.stdout.close()
        finish_steps(folder, 3, 4)
        process.stdin.close()
        assert process.wait(60) == 0
    assert [text[:2] for text in out.read_text().splitlines()] == ["[1", "[2", "[3", "[4", "fi"]


def test_a_log_that_cannot_be_written_is_a_warning(tmp_path: Path, fake: Fake) -> None:
    fake()
    folder = run_folder(tmp_path)
    folder.tracker_log("wandb").mkdir()
    (said,) = follow(folder, 2, "wandb")
    assert "the tracker wandb fails: [Errno 21] Is a directory" in said


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_server_that_does_not_answer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real library, and a port that nobody listens at: it tries again for minutes, while training goes on."""
    pytest.importorskip(name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    settings: dict[str, Any] = {
        "wandb": {"WANDB_BASE_URL": address, "WANDB_API_KEY": "x" * 40, "WANDB_MODE": "online"},
        "mlflow": {"MLFLOW_TRACKING_URI": address},
    }
    for key, value in settings[name].items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(module, "PATIENCE_S", 4.0)
    folder, began = run_folder(tmp_path), time.monotonic()
    (said,) = follow(folder, 3, name, until=bool)
    assert f"the tracker {name} fails and lacks 2 steps: " in said
    assert time.monotonic() - began < 30
    assert "x" * 40 not in said + folder.resolved.read_text()
