"""Small runs of two ranks that are harmed, and what must be the same afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config.load import load
from engine.control.chaos import Fault, plant
from engine.launch.run import train
from engine.run.folder import RunFolder
from tests.root import ROOT
from tests.tiers import begins_world
from tests.trainer.worlds import in_worlds

SMALL = [
    "recipe=quickstart",
    "context=256",
    "capacity=128",
    "batch_tokens=512",
    "model.layers=2",
    "model.hidden=32",
    "model.ffn=48",
    "data.validation_tokens=512",
    "run.validate_every=4",
    "run.checkpoint_every=3",
    "run.restarts=0",
]


def command(out: Path, data: Path, steps: int, *more: str) -> list[str]:
    """The command of a run. Ranks have one thread, as those of `train_unharmed`: else sums differ in the last bit."""
    program = [sys.executable, "-m", "bytescale_cli", "train"]
    return ["env", "OMP_NUM_THREADS=1", *program, *_overrides(out, data, steps, *more)]


def train_unharmed(out: Path, data: Path, steps: int, *more: str, resume: str = "auto") -> list[str]:
    """Train as `command` does where nothing is harmed, but write no report. The ranks have imported everything before.

    Returns what the run says.
    """
    said = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        in_worlds(patch, steps)
        train(load(_overrides(out, data, steps, *more)), resume=resume, say=said.append)
    return said


def _overrides(out: Path, data: Path, steps: int, *more: str) -> list[str]:
    return [*SMALL, f"run.out={out}", "data=stdlib", f"data.path={data}", f"run.steps={steps}", *more]


def documents(folder: Path) -> Path:
    """Write a few real source files, from this repository, into a folder."""
    for path in sorted((ROOT / "engine" / "planner").glob("*.py")):
        if path.stat().st_size:
            (folder / path.name).write_bytes(path.read_bytes()[:500])
    return folder


def losses(out: Path) -> dict[int, tuple[float, float | None]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "each step once"
    return {line["step"]: (line["loss"], line.get("validation_loss")) for line in lines}


def ledger(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "ledger").iterdir()}


def ranks_of(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    """List the rank processes, rank 0 first: the children of the agent."""
    found = []
    for agent in psutil.Process(process.pid).children():
        with suppress(psutil.Error):  # a process of the launcher that has just ended
            if "engine.launch.agents.agent" in agent.cmdline():
                found += [child for child in agent.children() if "engine.trainer" in child.cmdline()]
    return found


def processes_of(out: Path) -> list[psutil.Process]:
    """List the processes, whoever started them, that have a log of the run open."""
    found = []
    for process in psutil.process_iter():
        try:
            opened = [file.path for file in process.open_files()]
        except psutil.Error:
            continue
        if any(path.startswith(str(RunFolder(out).logs)) for path in opened):
            found.append(process)
    return found


@dataclass(frozen=True)
class End:
    """How a start of a run ended: the exit code, what it said, and how many seconds after the fault that was."""

    code: int
    said: str
    after_s: float


class Launcher:
    """A launcher in a process of its own, on a run that allows chaos."""

    def __init__(self, arguments: list[str], out: Path) -> None:
        begins_world()
        self.out, self._said = out, out.with_name(f"{out.name}.said")
        with self._said.open("w") as file:
            self.process = subprocess.Popen([*arguments, "run.chaos=true"], stdout=subprocess.DEVNULL, stderr=file)
        self.began = time.time()

    def wait_for_steps(self, count: int) -> None:
        """Wait until this start has finished some steps."""
        while self._said.read_text().count("\nstep ") < count:
            assert self.process.poll() is None, self._said.read_text()
            time.sleep(0.01)

    def plant(self, rank: int, fault: Fault) -> None:
        """Plant a fault before ranks can reach it: they import for seconds, and the folder is there before."""
        while not RunFolder(self.out).chaos.is_dir():
            assert self.process.poll() is None, self._said.read_text()
            time.sleep(0.01)
        plant(RunFolder(self.out).chaos, rank, fault)

    def end(self, harmed: float | None = None, timeout_s: float = 240) -> End:
        """Wait for the end. The fault was at `harmed`, or when the last one happened that was planted.

        Asserts that no process is left.
        """
        code = self.process.wait(timeout_s)
        now, log = time.time(), RunFolder(self.out).chaos / "log.jsonl"
        if harmed is None:
            harmed = json.loads(log.read_text().splitlines()[-1])["time"] if log.exists() else now
            assert harmed >= self.began, "the fault has not happened"
        deadline = time.monotonic() + 25
        while left := processes_of(self.out):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        return End(code, self._said.read_text(), now - harmed)
