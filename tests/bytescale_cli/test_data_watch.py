from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from bytescale_cli import data_watch
from bytescale_cli.main import run
from engine.data.runtime import watching
from engine.files import LOCK, locked
from tests.data.runtime.planes import COST, event, write

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run on Ray whose host actor was replaced."""
    events = [
        event("taken", "planner", 1, "start"),
        event("taken", "host-0", 2, "start"),
        event("lost", "host-0", 2, "deadline"),
        event("taken", "host-0", 3, "deadline", seconds=5.5),
        {"time": 5, "what": "scaled", "step": 2, "host": None, "before": 1, "after": 3, "source": "data"},
        {"time": 6, "what": "queue", "waiting": 12, "packing": 4},
    ]
    lines = [{"step": 2, "packed": {"data": COST}, "plan_wait_s": 0.5, "data_wait_s": 0.25, "step_s": 2.0}]
    return write(tmp_path / "run", events, lines, "data.runtime=ray")


@pytest.mark.parametrize("flags", [[], ["--once"]])
def test_tables_of_roles_replaced_actors_and_sources(folder: Path, capsys: Capture, flags: list[str]) -> None:
    assert run(["data", "watch", str(folder), *flags]) == 0
    facts, roles, replaced, sources = capsys.readouterr().out.split("\n\n")
    assert facts.splitlines()[0] == f"{folder}: not running"
    loaders, queue = facts.splitlines()[-2:]
    assert loaders.split() == ["loaders", "3,", "last", "changed", "for", "data"]
    assert queue.split()[:6] == ["blocks", "12", "waiting,", "4", "being", "packed"]
    rows = [line.split() for line in roles.splitlines()]
    assert rows[0] == ["role", "host", "epoch", "pid", "since", "state"]
    assert [row[:4] for row in rows[1:]] == [["planner", "0", "1", "101"], ["host-0", "0", "3", "103"]]
    assert [row[-1] for row in rows[1:]] == ["ended", "ended"]
    row = replaced.splitlines()[1].split()
    assert row[2:] == ["host-0", "0", "2", "3", "5.50", "s", "deadline"]
    assert sources.splitlines()[1].split() == ["data", "2", "30", "900", "0.50", "0.25"]


def test_json(folder: Path, capsys: Capture) -> None:
    assert run(["data", "watch", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["watch"]
    assert (found["runtime"], found["running"], found["step"]) == ("ray", False, 2)
    assert [one["pid"] for one in found["roles"]] == [101, 103]
    assert found["replaced"] == [
        {"time": 2.0, "role": "host-0", "host": 0, "epoch": 2, "why": "deadline", "by": 3, "seconds": 5.5}
    ]
    assert (found["loaders"], found["loaders_for"]) == (3, "data")
    assert (found["queue"], found["queue_at"]) == ({"waiting": 12, "packing": 4}, 6)
    assert found["sources"] == [{"source": "data", "busy": 0.25, **COST}]


def test_a_role_without_an_actor_says_why(folder: Path, capsys: Capture) -> None:
    with (folder / "data" / "events-host-1.jsonl").open("a") as file:
        file.write(json.dumps(event("lost", "host-0", 3, "ActorDiedError")) + "\n")
    assert run(["data", "watch", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "lost: its process ended" in out and "ActorDiedError" not in out


def test_on_a_terminal_the_tables_are_refreshed_until_the_run_ends(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(data_watch, "_AGAIN_S", 0)
    looks, real, pauses, real_sleep = list[bool](), watching.watched, list[float](), time.sleep
    monkeypatch.setattr("time.sleep", pauses.append)
    with locked(folder / LOCK):

        def look(path: Path) -> watching.Watched:
            found = real(path)
            looks.append(found.running)
            real_sleep(0.05)  # the folder of a long run is large: most of the time it is not read
            return found if len(looks) < 3 else watching.Watched(**{**vars(found), "running": False})

        monkeypatch.setattr(watching, "watched", look)
        assert run(["data", "watch", str(folder)]) == 0
    assert looks == [True] * 3 and len(pauses) == 2 and min(pauses) >= 0.45
    out = capsys.readouterr().out
    assert out.count("next epoch") >= 2 and "ended" not in out[: out.index("next epoch")]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_folder_without_a_data_plane_is_refused(tmp_path: Path, capsys: Capture, flags: list[str]) -> None:
    write(tmp_path / "tokens", [], [], "data=tokens", "data.path=none", "model.vocab=300")
    for name in ("tokens", "none"):
        assert run(["data", "watch", str(tmp_path / name), *flags]) == 2
        said = capsys.readouterr()
        key = json.loads(said.out)["error"]["key"] if flags else said.err
        assert str(tmp_path / name) in key


@pytest.mark.parametrize(("step", "blocks", "said"), [(2, 0, True), (2, 2, False), (0, 0, False)])
def test_that_all_blocks_were_packed_before_the_first_step_is_said(
    tmp_path: Path, capsys: Capture, step: int, blocks: int, said: bool
) -> None:
    lines = [{"step": 2, "step_s": 2.0, "packed": {"data": COST | {"blocks": blocks}} if blocks else {}}] * (step > 0)
    assert run(["data", "watch", str(write(tmp_path / "run", [], lines))]) == 0
    assert ("packed before the first one" in capsys.readouterr().out) == said
