"""Measures this machine: starts ranks that measure, waits for them, and fits the calibration. Imports no torch."""

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
from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.config.units import counted
from engine.cost.calibration import Calibration
from engine.errors import ConfigError
from engine.hardware.fit import Point, calibrate, points
from engine.hardware.measured import RESULT, Measured, read
from engine.hardware.prepare import measuring, write_folder
from engine.launch.commands import free_port, rank_commands
from engine.launch.ranks import PreemptedError, RankError, run_ranks
from engine.run.folder import RunFolder

SECONDS = 36.0  # of measuring, approximately; starting the ranks takes ten more
Say = Callable[[str], None]


@dataclass(frozen=True)
class Profile:
    """The result of `profile-hardware`: the measurements, the calibration fitted to them, and how well it fits."""

    calibration: Calibration
    measured: Measured
    config: Config  # with which it was measured
    points: list[Point]

    @property
    def median_error(self) -> float:
        """Median relative error of the cost model over the measured micro-batches."""
        return float(np.median([abs(point.error) for point in self.points]))

    @property
    def worst(self) -> Point:
        """The micro-batch with the largest relative error."""
        return max(self.points, key=lambda point: abs(point.error))

    @property
    def spread(self) -> float:
        """Median over micro-batches of (median time - best) / best: large when other programs use the machine."""
        return float(np.median([timing.spread for _, timing in self.measured.micro_batches]))


def profile(config: Config, gpus: int, say: Say) -> Profile:
    """Measure on up to two of this machine's `gpus` GPUs, or on two CPU ranks if it has none; takes about a minute.

    Raises ConfigError or MemoryFitError for a recipe that cannot run here, PreflightError if the timings give no
    calibration, and RankError if a rank fails.
    """
    check_cluster(config, gpus)
    ranks = min(gpus, 2) or 2
    with _folder() as folder:
        ours = measuring(config, ranks, folder.root)
        kind = "GPU" if gpus else "CPU"
        say(f"measuring model={ours.model.name} with {counted(ours.model.layers, 'layer')} on {ranks} {kind} ranks")
        write_folder(ours, folder)
        # Each rank has as many threads as in training, where `ranks_per_node` ranks share the cores.
        own_cores = max((os.cpu_count() or 1) // config.cluster.ranks_per_node, 1)
        threads = os.environ.get("OMP_NUM_THREADS") or str(own_cores)
        arguments = (sys.executable, "-m", "engine.hardware", str(folder.root), str(SECONDS))
        commands = [
            replace(command, arguments=arguments, environment={**command.environment, "OMP_NUM_THREADS": threads})
            for command in rank_commands(Cluster.of(ours.cluster), folder, None, free_port(), uses_gpus(ours))
        ]
        try:
            run_ranks(commands, folder, lambda: None, lambda text: None)
        except PreemptedError:
            raise KeyboardInterrupt from None  # nothing was saved, so there is nothing to resume
        measured = read(folder.root / RESULT)
    calibration = calibrate(measured, ours)
    return Profile(calibration, measured, ours, points(measured, calibration, ours))


@contextmanager
def _folder() -> Iterator[RunFolder]:
    """Yield a temporary folder. If a rank fails the folder is kept for its logs, otherwise removed."""
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
    """Raise ConfigError for a cluster of GPUs if this machine has none: CPUs would be measured."""
    if gpus == 0 and uses_gpus(config):
        message, key = "this machine has no GPU, but the cluster's machines do", f"cluster={config.cluster.name}"
        raise ConfigError(message, key=key, hint="run it on a machine with such GPUs, or choose cluster=local")
