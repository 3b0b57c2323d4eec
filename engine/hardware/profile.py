"""Measures this machine: starts the ranks that measure, waits for them, and fits the calibration. No torch here."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.cluster.cluster import Cluster
from engine.config.schema import Config
from engine.config.units import counted
from engine.cost.calibration import Calibration
from engine.cost.datasheets import nominal
from engine.errors import ConfigError
from engine.hardware.fit import Point, calibrate, points
from engine.hardware.measured import RESULT, Measured, read
from engine.hardware.prepare import measuring, write_folder
from engine.launch.commands import RankCommand, free_port, rank_commands
from engine.launch.ranks import PreemptedError, RankError, run_ranks
from engine.trainer.folder import RunFolder

SECONDS = 36.0  # of measuring, about; starting takes ten more
Say = Callable[[str], None]


@dataclass(frozen=True)
class Profile:
    """What `profile-hardware` found."""

    calibration: Calibration
    measured: Measured
    config: Config  # that was measured with
    points: list[Point]

    @property
    def median_error(self) -> float:
        """Return the median relative error of the cost model over the measured micro-batches."""
        return float(np.median([abs(point.error) for point in self.points]))

    @property
    def worst(self) -> Point:
        """Return the micro-batch that the cost model knows worst."""
        return max(self.points, key=lambda point: abs(point.error))

    @property
    def spread(self) -> float:
        """Return how far a median timing lay above the best one, in the median: a sign of other work on the machine."""
        return float(np.median([timing.spread for _, timing in self.measured.micro_batches]))


def profile(config: Config, gpus: int, say: Say) -> Profile:
    """Measure on this machine's GPUs, two at most, or without any on two CPU ranks; it takes about a minute.

    Raises ConfigError or MemoryFitError for a recipe that cannot run here, PreflightError where the timings give no
    calibration, and RankError where a rank fails.
    """
    check_cluster(config, gpus)
    ranks = min(gpus, 2) or 2
    with _folder() as folder:
        ours = measuring(config, ranks, folder.root)
        kind = "GPU" if gpus else "CPU"
        say(f"measuring model={ours.model.name} with {counted(ours.model.layers, 'layer')} on {ranks} {kind} ranks")
        write_folder(ours, folder)
        _run(ours, config.cluster.ranks_per_node, folder)
        measured = read(folder.root / RESULT)
    calibration = calibrate(measured, ours)
    return Profile(calibration, measured, ours, points(measured, calibration, ours))


@contextmanager
def _folder() -> Iterator[RunFolder]:
    """Yield a folder to measure in, and remove it; where a rank failed it stays, for the logs in it."""
    root = Path(tempfile.mkdtemp(prefix="bytescale-hardware-"))
    kept = False
    try:
        yield RunFolder(root)
    except RankError:
        kept = True
        raise
    finally:
        if not kept:
            shutil.rmtree(root)


def check_cluster(config: Config, gpus: int) -> None:
    """Raise ConfigError for a preset of GPU machines where there is no GPU: what is measured would not be its rates."""
    name = config.cluster.name
    if gpus == 0 and nominal(name).source.startswith("data sheet"):
        hint = "run it on such a machine, or choose cluster=local"
        raise ConfigError("is a machine with GPUs, and this one shows none", key=f"cluster={name}", hint=hint)


def _run(config: Config, neighbours: int, folder: RunFolder) -> None:
    """Run the ranks. Each has as many threads as in training, where `neighbours` share the machine's cores."""
    threads = os.environ.get("OMP_NUM_THREADS") or str(max((os.cpu_count() or 1) // neighbours, 1))
    commands = rank_commands(Cluster.of(config.cluster), folder, None, free_port())
    try:
        run_ranks(
            [_measuring(command, threads, folder) for command in commands], folder, lambda: None, lambda text: None
        )
    except PreemptedError:
        raise KeyboardInterrupt from None  # nothing was saved, and nothing is to be resumed


def _measuring(command: RankCommand, threads: str, folder: RunFolder) -> RankCommand:
    arguments = (sys.executable, "-m", "engine.hardware", str(folder.root), str(SECONDS))
    return replace(command, arguments=arguments, environment={**command.environment, "OMP_NUM_THREADS": threads})
