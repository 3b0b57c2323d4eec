"""Completion as the installed shells do it, on a pseudo-terminal, and the candidates that it offers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest
from typer.main import get_command

from bytescale_cli.completion import SHELLS, candidates, split
from bytescale_cli.main import app, run
from engine.config import keys, tree
from engine.planner.planners import PLANNERS
from tests.bytescale_cli.screen import open_terminal
from tests.processor import processor_seconds
from tests.root import ROOT

pytestmark = pytest.mark.long

START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
LOAD = {
    "bash": "source <(bytescale completion bash)",
    "zsh": "autoload -Uz compinit; compinit -u -D; source <(bytescale completion zsh)",
    "fish": "bytescale completion fish | source",
}
WAIT_S = 60.0  # on a busy machine each TAB may take seconds


class Shell:
    """An interactive shell on a pseudo-terminal, in which `bytescale` writes its arguments to a file."""

    def __init__(self, name: str, folder: Path) -> None:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
        self.arguments, self.screen = folder / "arguments", ""
        bytescale = folder / "bin" / "bytescale"
        bytescale.parent.mkdir()
        ours = f'PYTHONPATH={ROOT} exec {sys.executable} -m bytescale_cli "$@"'
        bytescale.write_text(
            f'#!/bin/sh\ncase "$1" in completion | candidates) {ours};; esac\n'
            f'printf "%s\\n" "$@" > {self.arguments}.new; mv {self.arguments}.new {self.arguments}\n'
        )
        bytescale.chmod(0o755)
        environment = {
            "PATH": f"{bytescale.parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "TERM": "xterm",
            "PS1": "> ",
        }
        self.ours, theirs = open_terminal(100)
        command = ["setsid", "--ctty", *START[name]]  # the shell needs a controlling terminal
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = subprocess.Popen(command, cwd=folder, env=environment, **streams)
        os.close(theirs)
        threading.Thread(target=self.read, daemon=True).start()
        self.type(f"{LOAD[name]}; echo load''ed\n")
        self.wait(lambda: "loaded" in self.screen)

    def read(self) -> None:
        """Collect what the shell shows."""
        while True:
            try:
                self.screen += os.read(self.ours, 65536).decode(errors="replace")
            except OSError:
                return

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def wait(self, done: object) -> None:
        """Wait until `done` returns true."""
        assert callable(done)
        end = time.monotonic() + WAIT_S
        while not done():
            assert time.monotonic() < end, self.screen
            time.sleep(0.05)

    def run(self, line: str) -> list[str]:
        """Type a line; return the arguments that `bytescale` got."""
        self.arguments.unlink(missing_ok=True)
        self.type(f"{line}\n")
        self.wait(self.arguments.exists)
        return self.arguments.read_text().splitlines()

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.ours)


@pytest.fixture(params=sorted(SHELLS))
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "my docs").mkdir()
    opened = Shell(request.param, tmp_path)
    yield opened
    opened.close()


def test_a_shell_completes_commands_keys_values_flags_and_paths(shell: Shell) -> None:
    assert shell.run("bytescale tra\trecipe=quick\trun.ste\t3") == ["train", "recipe=quickstart", "run.steps=3"]
    assert shell.run("bytescale plan recompute=layer_\t--ste\t2") == [
        *("plan", "recompute=layer_keep_attention", "--steps", "2"),
    ]
    assert shell.run("bytescale plan optimizer=sg\tdata.path=my\t") == ["plan", "optimizer=sgd", "data.path=my docs/"]
    assert shell.run("bytescale simulate --sweep planner=static,bal\t") == [
        *("simulate", "--sweep", "planner=static,balanced"),
    ]


@pytest.mark.parametrize(
    ("typed", "listed"),
    [
        ("bytescale train recipe=ll\t\t\t", [name for name in tree.recipes() if name.startswith("llama7b")]),
        ("bytescale ckpt \t\t", ["export", "import", "list"]),
    ],
)
def test_a_shell_lists_what_a_word_can_become(typed: str, listed: list[str], shell: Shell) -> None:
    shell.type(typed)
    assert len(listed) >= 3
    shell.wait(lambda: all(re.search(rf"\b{name}\b", shell.screen) for name in listed))


def found(*words: str) -> list[str]:
    *before, current = words
    return [word for word, _ in candidates(get_command(app), before, current)]


def test_commands_and_flags() -> None:
    assert {"train", "plan", "ckpt", "completion"} <= set(found("")) and "candidates" not in found("")
    assert found("ckpt", "ex") == ["export"]
    assert found("train", "--h") == ["--help", "--hostfile"]
    assert found("train", "--launcher", "") == ["hostfile", "k8s", "local", "slurm"]
    assert found("train", "--launcher=l") == ["--launcher=local"]
    assert found("train", "--nproc", "") == []
    assert found("completion", "") == ["bash", "fish", "zsh"]
    assert found("recipes", "show", "quick") == ["quickstart"]
    assert found("chaos", "r1", "k") == ["kill-rank"]
    assert found("chaos", "r1", "kill-rank", "--at", "re") == ["reduce", "rename"]
    assert found("nonsense", "") == found("")


def test_keys_and_values() -> None:
    assert set(found("plan", "")) >= {f"{key}=" for key in keys.leaves()} | {f"{group}=" for group in tree.groups()}
    assert found("plan", "recipe=") == [f"recipe={name}" for name in tree.recipes()]
    assert found("plan", "--steps", "3", "planner=") == [f"planner={name}" for name in sorted(PLANNERS)]
    assert found("plan", "model.tied=") == ["model.tied=false", "model.tied=true"]
    assert found("plan", "zero.stage=") == ["zero.stage=1", "zero.stage=2", "zero.stage=3"]
    assert found("plan", "offload.ratio=") == ["offload.ratio=auto"]
    assert "cluster.hostfile=null" in found("plan", "cluster.hostfile=")
    assert found("plan", "run.steps=") == found("plan", "no.key=") == []
    assert found("simulate", "--planners", "static,a") == ["static,adaptive"]
    assert found("simulate", "--sweep", "zero.stage=1,") == [f"zero.stage=1,{stage}" for stage in (1, 2, 3)]


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.yaml", ".hidden"):
        (tmp_path / name).touch()
    (tmp_path / "docs" / "inner").mkdir(parents=True)
    assert found("train", "--config", "m") == ["mine.yaml"]
    assert found("train", "--out", "") == ["docs/", "mine.yaml"]
    assert found("train", "recipe=./") == ["recipe=./docs/", "recipe=./mine.yaml"]
    assert found("train", f"data.path={tmp_path}/docs/") == [f"data.path={tmp_path}/docs/inner/"]
    assert found("train", "data.path=.h") == ["data.path=.hidden"]
    assert found("train", "data.path=nowhere/") == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("bytescale ", ["bytescale", ""]),
        ("bytescale tr", ["bytescale", "tr"]),
        ("bytescale train recipe=", ["bytescale", "train", "recipe="]),
        ("bytescale train data.path='my do", ["bytescale", "train", "data.path=my do"]),
        (r"bytescale train data.path=my\ do", ["bytescale", "train", "data.path=my do"]),
    ],
)
def test_a_line_is_split_as_the_shell_does_it(line: str, words: list[str]) -> None:
    assert split(line) == words


@pytest.mark.parametrize("shell", sorted(SHELLS))
def test_a_script_is_data(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell, "--json"]) == 0
    script = json.loads(capsys.readouterr().out)["completion"]["script"]
    assert run(["completion", shell]) == 0
    assert capsys.readouterr().out == script
    assert f"bytescale completion {shell}" in script.splitlines()[1] + script.splitlines()[2]


def test_an_unknown_shell_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "fsh"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == "hint: did you mean fish?"


def test_no_candidate_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["candidates", "--", "plan", "recipe=none"]) == 0
    assert capsys.readouterr().out == ""


def test_a_completion_imports_nothing_heavy_and_is_fast() -> None:
    words = ["candidates", "--", "train", "run.o"]
    code = f"import sys; from bytescale_cli.main import run; run({words!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(done.stdout.split()) & {"torch", "deepspeed", "numpy", "hydra", "numba"} == set()
    # Processors differ in speed, and other work on a machine adds to a measurement by half.
    libraries = [sys.executable, "-c", "import typer, rich.console, yaml, pydantic.main"]
    command = [sys.executable, "-m", "bytescale_cli", *words]
    least = took = inf
    for _ in range(10):
        least, took = min(least, processor_seconds(libraries)), min(took, processor_seconds(command))
        if took <= 2.5 * least:
            return
    raise AssertionError(f"{took:.2f} s, of which the libraries {least:.2f} s")
