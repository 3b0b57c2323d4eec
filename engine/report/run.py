"""Reads a run folder, and writes the report of its run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config.load import read_resolved
from engine.config.schema import Config
from engine.data.runtime.watching import loaders_of, plane_events
from engine.errors import BytescaleError, StorageError
from engine.files import LOCK
from engine.planner.plan.step_plan import StepPlan
from engine.readers import GIB, LARGE, read_bytes, read_object
from engine.report.boxes import Span, of_plan
from engine.run.flight_recorder import first_mismatch
from engine.run.folder import RunFolder
from engine.run.launches import LaunchRecord, read_launches
from engine.run.metrics import read_metrics
from engine.run.speed import Speed
from engine.run.status import is_locked


@dataclass(frozen=True)
class Trace:
    """One measured step: its number, its plan, and the times of each micro-batch of the ranks shown."""

    step: int
    plan: StepPlan
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class RunData:
    """The contents of a run folder. `trace` is None without a measured step; `summary` may be empty."""

    config: Config
    summary: Mapping[str, float | None]
    lines: tuple[Mapping[str, Any], ...]  # one per step, as in metrics.jsonl
    trace: Trace | None
    name: str = ""  # of its folder
    launches: Sequence[LaunchRecord] = ()
    running: bool = False
    loaders: Sequence[tuple[int, int]] = ()  # (first step, how many) of all hosts
    nccl: str | None = None  # the operation of NCCL that could not end, if ranks have written records

    @property
    def tokens(self) -> NDArray[np.float64]:
        """Tokens of all steps up to each one, [steps]."""
        return np.cumsum(np.nan_to_num(self.column("tokens")))

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds in steps up to the end of each one, [steps]: without validation, checkpoints and starts."""
        return np.cumsum(np.nan_to_num(self.column("step_s")))

    def column(self, name: str) -> NDArray[np.float64]:
        """The values of a metric over all steps, [steps]; NaN for steps without it."""
        values = (line.get(name) for line in self.lines)
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    @property
    def starts(self) -> list[int]:
        """The first step of each start; empty without a record of them."""
        return [one.step for one in self.launches]

    @property
    def speed(self) -> Speed | None:
        """The medians of the steps; None if no step was completed."""
        return Speed.of(self.lines, self.starts)

    @property
    def bigram_nats(self) -> float:
        """Bigram entropy of the corpus in nats per token; NaN if the run has not computed it."""
        found = self.summary.get("bigram_nats")
        return float("nan") if found is None else found


def read_run(folder: Path, say: Callable[[str], None] = lambda line: None) -> RunData:
    """Read the folder of a run, which may have stopped early. `say` gets which lines of its metrics are damaged.

    Raises ConfigError if resolved.yaml cannot be read, and StorageError if another file is damaged.
    """
    run = RunFolder(folder)
    with _named(run.summary):
        summary = read_object(run.summary) if run.summary.exists() else {}
    running = is_locked(run.root / LOCK)
    config, lines = read_resolved(run.resolved), tuple(read_metrics(run.metrics, say, growing=running))
    trace = None
    if run.plan.exists() and run.trace.exists():
        with _named(run.plan):
            plan = StepPlan.from_bytes(read_bytes(run.plan, GIB))
        with _named(run.trace):
            measured = read_object(run.trace, LARGE)
            spans = tuple(Span(*span) for span in measured["spans"])
            # After a crash between the writes of the two files, they may be of different steps.
            if of_plan(plan, spans):
                trace = Trace(measured["step"], plan, spans)
    loaders = loaders_of(plane_events(run))
    launches = read_launches(run.launches)
    nccl = first_mismatch(run, launches[-1].ranks) if launches else None
    return RunData(config, summary, lines, trace, folder.resolve().name, launches, running, loaders, nccl)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn any failure of a reader into a StorageError that names the file: a damaged file may contain anything."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        said = f"it {error}" if isinstance(error, BytescaleError) else f"{type(error).__name__}: {error}"
        message = f"is damaged: {said}"
        raise StorageError(message, key=str(path), hint="remove it; the report then omits its contents") from error
