"""A small run on several hosts, which must learn what two or three ranks of this host learn that nothing interrupts."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config.load import load
from engine.launch.run import train
from tests.trainer.worlds import in_worlds

SMALL = ["recipe=quickstart", "model.layers=1", "context=256", "capacity=128", "batch_tokens=512", "run.restarts=0"]
# Ranks have one thread, as those of worlds: else sums may differ in the last bit.
ONE_THREAD = ["env", "OMP_NUM_THREADS=1", "BYTESCALE_FORWARD=OMP_NUM_THREADS", sys.executable, "-m", "bytescale_cli"]


class SmallRun:
    """The commands of such a run in any folder, and its losses."""

    def __init__(self, folder: Path, steps: int) -> None:
        """Write its documents to a folder."""
        self._folder, self._steps = folder, steps
        for number in range(12):
            (folder / f"{number}.py").write_text(f"print({number})\n" * 300)
        self.expected = functools.cache(self._train)

    def settings(self, out: Path, steps: int | None = None) -> list[str]:
        """Return the overrides of a run in the folder `out`."""
        sizes = [f"run.steps={steps or self._steps}", "run.checkpoint_every=3", "data.validation_share=0"]
        return [*SMALL, *sizes, f"run.out={out}", "data=stdlib", f"data.path={self._folder}"]

    def command(self, out: Path, *more: str, steps: int | None = None) -> list[str]:
        """Return the command of a run in the folder `out`."""
        return [*ONE_THREAD, "train", *self.settings(out, steps), *more]

    def _train(self, ranks: int = 2) -> list[float]:
        """Return the losses of a number of ranks of this host. They train once, when they are first asked for."""
        out = self._folder / f"of-{ranks}-ranks"
        with pytest.MonkeyPatch.context() as patch:
            in_worlds(patch, self._steps)
            train(load([*self.settings(out), f"cluster.ranks_per_node={ranks}"]), say=lambda line: None)
        found = losses(out)
        assert len(found) == self._steps
        return found


def losses(out: Path) -> list[float]:
    """Return the losses of a run, which must have recorded each step once."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def has_trained(out: Path, steps: int) -> bool:
    """Return whether a run has recorded so many steps."""
    metrics = out / "metrics.jsonl"
    return metrics.exists() and metrics.read_bytes().count(b"\n") >= steps


def wait(due: Callable[[], bool], seconds: float, what: Callable[[], object] = lambda: "") -> None:
    """Wait until something is the case; else fail with `what`."""
    last = time.monotonic() + seconds
    while not due():
        assert time.monotonic() < last, what()
        time.sleep(0.05)
