"""What the doctor prints. Its checks: tests/doctor."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bytescale_cli.main import run
from engine.doctor import examine
from tests.bytescale_cli.checks import LONG, WAY_OUT, all_states
from tests.doctor.planted import environment, examined, named


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "examine", lambda job, say: all_states(fails=True))


def test_json(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["error"]["code"]) == (False, 3)
    assert answer["error"]["message"] == "1 of 9 checks failed: open files"
    doctor = answer["doctor"]
    assert set(doctor) == {"ok", "checks", "report"} and not doctor["ok"]
    assert all(set(check) == {"name", "section", "state", "value", "message", "hint"} for check in doctor["checks"])
    assert named(doctor, "open files") == {
        "name": "open files",
        "section": "system",
        "state": "failed",
        "value": "256 files",
        "message": LONG,
        "hint": WAY_OUT,
    }
    assert "failed: open files: a process may open 256 files" in doctor["report"]


def test_text(broken: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Hosts have one row each, and one for each check that is not ok."""
    assert run(["doctor"]) == 3
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert "Does the system allow enough?" in lines
    at = lines.index(f"failed  open files  {LONG}")
    assert lines[at + 1].strip() == f"-> {WAY_OUT}"
    assert [line for line in lines if "host 1" in line] == [
        "ok       host 1         gpu-a answers after 0.4 s; 2 checks ok"
    ]
    assert [line.split()[0] for line in lines if "  host 2" in line] == ["ok", "warning"]
    assert "6 ok, 1 warning, 1 failed, 1 skipped" in lines
    assert "To report a bug, paste this:" in lines
    assert captured.err.splitlines()[-2:] == [
        "error: 1 of 9 checks failed: open files",
        "hint: each one suggests a fix",
    ]


def test_nothing_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Warnings are no failure."""
    monkeypatch.setattr(examine, "examine", lambda job, say: all_states())
    assert run(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] and answer["doctor"]["ok"] and "error" not in answer


def test_the_hostfile_is_named_as_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake of the user is none of the machine."""
    assert run(["doctor", "--hostfile", str(tmp_path / "none")]) == 2
    assert f"--hostfile: the hostfile {tmp_path}" in capsys.readouterr().err.splitlines()[0]
    (tmp_path / "hosts").write_text("localhost slots=1\ngpu-a slots=1\n")
    assert run(["doctor", "--hostfile", str(tmp_path / "hosts")]) == 2
    assert "every host resolves that name to itself" in capsys.readouterr().err


@pytest.mark.world
def test_all_of_it(tmp_path: Path) -> None:
    """The real torch, DeepSpeed and two ranks, on this machine."""
    words = ["doctor", "--json", f"run.out={tmp_path}/run", f"data.cache={tmp_path}/cache"]
    doctor = examined([sys.executable, "-m", "bytescale_cli", *words], environment(CUDA_VISIBLE_DEVICES=""))
    for name in ("torch", "deepspeed", "attention kernel", "run folder", "checkpoint", "all-reduce", "ring"):
        assert named(doctor, name)["state"] == "ok", name
    assert len({check["name"] for check in doctor["checks"]}) == len(doctor["checks"])
    assert list(tmp_path.iterdir()) == []
