"""The command line as a user meets it: one JSON object, a fast `--help`. Mistakes are in tests/mistakes/."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

# They keep the `load` that they import, so they are imported before a test replaces it.
import engine.data.scale
import engine.weights.model  # noqa: F401
from bytescale_cli.main import run
from tests.bytescale_cli.commands import commands
from tests.processor import processor_seconds

BYTESCALE = Path(sys.executable).parent / "bytescale"
HEAVY = {"torch", "deepspeed", "ray", "numpy", "pydantic", "hydra", "matplotlib", "rich", "yaml"}


def test_ctrl_c_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.config.load.load", interrupted)
    assert run(["plan", "--json"]) == 130
    captured = capsys.readouterr()
    assert captured.err == "interrupted\n"
    assert json.loads(captured.out)["error"]["code"] == 130


def test_a_scheduler_that_stops_a_command_before_its_ranks_start_is_told_as_ctrl_c_is() -> None:
    program = (
        "import os, signal, sys\nimport engine.config.load\nfrom bytescale_cli.main import run\n"
        "engine.config.load.load = lambda overrides, say: os.kill(os.getpid(), signal.SIGTERM)\nsys.exit(run(['plan']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_bug_ends_in_70_and_a_saved_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*overrides: object, **options: object) -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("engine.config.load.load", broken)
    assert run(["train", "recipe=quickstart"]) == 70
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "unforeseen" in said[0]
    assert "unforeseen" in next(tmp_path.iterdir()).read_text(encoding="utf-8")


@pytest.mark.parametrize("line", ["plan --help", "report --help", "generate --help", "runs compare --help"])
def test_help_shows_no_types_of_python(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 0
    said = capsys.readouterr().out
    assert "Arguments:" in said and "<" not in said


@pytest.mark.parametrize("line", ["", "--help", "train --help", "plan --help", "recipes --help", "config show --help"])
def test_help_is_data(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Usage: bytescale")
    assert captured.err == ""


@pytest.mark.parametrize(
    "line", ["--help", *(f"{group} --help" for group in ("ckpt", "config", "data", "recipes", "runs"))]
)
def test_no_sentence_of_a_list_of_commands_is_cut_off(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 0
    commands = capsys.readouterr().out.split("Commands:\n")[1]
    assert commands and "..." not in commands


def test_installed_command(tmp_path: Path) -> None:
    """Through the real command and from another folder."""
    done = subprocess.run([BYTESCALE, "train", "recipe=quikstart"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["error: recipe: unknown name: quikstart", "hint: did you mean quickstart?"]


def test_installed_command_in_json(tmp_path: Path) -> None:
    command = [BYTESCALE, "config", "show", "context=64K", "capacity=32K", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["config"]["context"] == 65536
    assert done.stderr == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr() == (f"bytescale {version('bytescale')}\n", "")


def test_the_version_of_sources_that_are_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert run(["--version"]) == 0
    assert "not installed" in capsys.readouterr().out


@pytest.mark.parametrize(("lines", "allowed"), [([""], set()), (commands(), {"pydantic"})])
def test_help_imports_nothing_heavy(lines: list[str], allowed: set[str]) -> None:
    """The help of all commands, in one process. For those with parameters Typer imports pydantic."""
    asked = [[*line.split(), "--help"] for line in lines]
    code = f"import sys; from bytescale_cli.main import run; [run(line) for line in {asked}]; "
    code += "print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("Usage: bytescale") == len(lines)
    assert set(done.stderr.split()) & HEAVY <= allowed


def test_help_is_fast() -> None:
    assert processor_seconds([BYTESCALE, "--help"]) <= 0.5


@pytest.mark.parametrize("line", ["", "--help", "plan --help"])
def test_help_that_nobody_reads_is_no_failure(line: str) -> None:
    """As in `bytescale --help | true`: the pipe's other end is closed before anything is written."""
    code = "import os, sys; r, w = os.pipe(); os.close(r); os.dup2(w, 1); from bytescale_cli.main import run; "
    command = [sys.executable, "-c", f"{code}sys.exit(run({line.split()!r}))"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_commands_own_broken_pipe_is_not_taken_for_help_that_nobody_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*overrides: object, **options: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "a rank has gone")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("engine.config.load.load", broken)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # Typer wraps both
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    assert run(["train", "recipe=quickstart"]) == 70
    assert "a rank has gone" in capsys.readouterr().err
