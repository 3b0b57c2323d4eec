"""The command line as a user meets it: few lines, the right code, one JSON object, and a fast `--help`."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from bytescale_cli.main import run
from tests.bytescale_cli.commands import commands
from tests.processor import processor_seconds

BYTESCALE = Path(sys.executable).parent / "bytescale"
HEAVY = {"torch", "deepspeed", "ray", "numpy", "pydantic", "hydra", "matplotlib", "rich", "yaml"}

MISTAKES = [
    ("tran recipe=quickstart", "no such command 'tran'", "did you mean train?"),
    ("export runs/x", "no such command 'export'", "did you mean ckpt export?"),
    ("config shw", "no such command 'shw'", "did you mean show?"),
    ("recipes", "missing command", "bytescale recipes --help"),
    ("train --nprok 2", "--nprok: unknown flag", "did you mean --nproc?"),
    ("train --lr 1e-4", "--lr: unknown flag", "without dashes: optimizer.lr=..."),
    ("plan --batch-tokens=1M", "--batch-tokens: unknown flag", "without dashes: batch_tokens=..."),
    ("train --optimizer.lr 1e-4", "--optimizer.lr: unknown flag", "without dashes: optimizer.lr=..."),
    ("train --recipe quickstart", "--recipe: unknown flag", "without dashes: recipe=..."),
    ("train --path a", "--path: unknown flag", "data.path=... or lengths.path=..."),
    ("recipes list --lr 1", "--lr: unknown flag", "bytescale recipes list --help"),
    ("train --qqq", "--qqq: unknown flag", "bytescale train --help"),
    ("train --bogus", "--bogus: unknown flag", "bytescale train --help"),
    ("train --nproc two", "--nproc: must be a whole number, not two", "bytescale train --help"),
    ("train --nproc 0", "--nproc: must be at least 1, not 0", "set --nproc 1 or more"),
    ("train --launcher locl", "--launcher: must be local or hostfile or slurm or k8s, not locl", "did you mean local?"),
    ("train --out a run.out=b", "--out: a conflicts with run.out=b", "only one"),
    ("train --resume", "--resume: needs a value", "--resume value"),
    ("train recipe=quikstart", "recipe: unknown name: quikstart", "did you mean quickstart?"),
    ("train quickstart", "quickstart: is not key=value", "write recipe=quickstart"),
    ("train run.step=3", "run.step: unknown key", "did you mean run.steps?"),
    ("train +run.step=3", "+run.step=3: a leading + is not supported", "key=value"),
    ("train dtype=fp23", "dtype: must be bf16, fp32 or fp64, not fp23", "did you mean fp32?"),
    ("train run.steps=many", "run.steps: must be a whole number, not many", "optimizer updates"),
    ("train parallel.tp=99999999999999999999", "parallel.tp: must be at most 65536", "parallel.tp=65536 or less"),
    ("plan lengths=lognormal lengths.sigma=1e300", "lengths.sigma: must be at most 10, not 1e300", "lengths.sigma=10"),
    (
        "train parallel.tp=4 cluster.ranks_per_node=8",
        "parallel.tp: 4 does not divide model.heads=2 or model.kv_heads=2",
        "parallel.tp=2",
    ),
    ("train zero.stage=4", "zero.stage: must be 1, 2 or 3, not 4", "zero.stage"),
    ("train data=folder", "data.path: is not set", "set data.path="),
    ("plan --steps 0", "--steps: must be at least 1, not 0", "--steps 3"),
    ("recipes show quikstart", "recipe: unknown name: quikstart", "did you mean quickstart?"),
    ("recipes show llama3-8b", "recipe: unknown name: llama3-8b", "llama3-8b-1m, llama3-8b-1m-16nodes, llama3-8b-256k"),
    ("recipes show ./none.yaml", "recipe: no such file: none.yaml", "bytescale recipes copy"),
    ("recipes list none", "none: no such folder", "bytescale recipes list"),
    ("recipes copy quikstart a.yaml", "recipe: unknown name: quikstart", "did you mean quickstart?"),
    ("recipes copy quickstart a", "file: a is not a yaml file name", "for example a.yaml"),
    ("recipes copy quickstart none/a.yaml", "file: none/a.yaml cannot be written", "choose a file in a folder"),
    ("train --config a.yaml recipe=b.yaml", "--config: a.yaml conflicts with recipe=b.yaml", "give only one"),
    ("train --config quickstart", "--config: no such file: quickstart", "did you mean recipe=quickstart?"),
    ("plan --config none.yml", "--config: no such file: none.yml", "bytescale recipes copy"),
    ("simulate --config none.yml", "--config: no such file: none.yml", "bytescale recipes copy"),
    ("plan recipe=none.yml", "recipe: no such file: none.yml", "bytescale recipes copy"),
    ("complet", "no such command 'complet'", "did you mean completion?"),
    ("runs lst", "no such command 'lst'", "did you mean list?"),
    ("recipes show", "name|file: is missing", "bytescale recipes show --help"),
]


@pytest.mark.parametrize(("line", "cause", "hint"), MISTAKES)
def test_mistakes(line: str, cause: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.split()) == 2
    captured = capsys.readouterr()
    said = captured.err.lower().splitlines()
    assert len(said) <= 3
    assert said[0].startswith(f"error: {cause}") or cause in said[0]
    assert said[-1].startswith("hint: ")
    assert hint in said[-1]
    assert captured.out == ""


@pytest.mark.parametrize("line", [line for line, _, _ in MISTAKES])
def test_mistakes_in_json(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*line.split(), "--json"] if line != "train --resume" else ["train", "--json", "--resume"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["ok"], answer["error"]["code"]) == (1, False, 2)
    assert set(answer["error"]) == {"code", "message", "key", "hint"}


def test_all_mistakes_of_a_config_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "run.step=3", "lr=1", "run.seed=-1"]) == 2
    assert [line.split(":")[1].strip() for line in capsys.readouterr().err.splitlines()] == [
        "run.step",
        "lr",
        "run.seed",
    ]


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


def test_a_cause_continues_its_line_in_lower_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trian"]) == 2
    assert capsys.readouterr().err.splitlines()[0] == "error: no such command 'trian'"


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
