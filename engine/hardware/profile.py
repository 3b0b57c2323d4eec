"""Measures this machine: starts ranks that measure, waits for them, and fits the calibration. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.config.units import counted
from engine.cost.calibration import Calibration
from engine.errors import PreflightError
from engine.folders import temporary
from engine.hardware.fit import Point, calibrate, points, split_launch_bound
from engine.hardware.measured import NETWORK, RESULT, Case, Measured, Timing, read, read_network
from engine.hardware.prepare import measuring, write_folder
from engine.job import Job
from engine.launch.agents.commands import node_commands
from engine.launch.agents.environment import environment_problem
from engine.launch.agents.ranks import PreemptedError, RankError, run_ranks
from engine.launch.checks.launchable import gpu_problem, no_gpus, pytorch_problem
from engine.run.folder import RunFolder

SECONDS = 36.0  # of measuring, approximately; starting the ranks takes ten more, and the network between two nodes five
Say = Callable[[str], None]


@dataclass(frozen=True)
class Profile:
    """The result of `profile-hardware`: the measurements, the calibration fitted to them, and how well it fits."""

    calibration: Calibration
    measured: Measured  # with the micro-batches to which the calibration was fitted
    config: Config  # with which it was measured
    points: list[Point]
    launch_bound: tuple[tuple[Case, Timing], ...]  # the others, of a GPU (`split_launch_bound`)

    @property
    def median_error(self) -> float:
        """Median relative error of the cost model over the micro-batches that it was fitted to."""
        return float(np.median([abs(point.error) for point in self.points]))

    @property
    def worst(self) -> Point:
        """The micro-batch with the largest relative error."""
        return max(self.points, key=lambda point: abs(point.error))

    @property
    def spread(self) -> float:
        """Median of (median time - best) / best over the micro-batches in `measured`.

        It is large when other programs use the machine.
        """
        return float(np.median([timing.spread for _, timing in self.measured.micro_batches]))


def profile(config: Config, gpus: int, say: Say, seconds: float = SECONDS) -> Profile:
    """Measure on up to two of this machine's `gpus` GPUs, or on two CPU ranks if it has none; takes about a minute.

    If the hostfile names two nodes, the network between the first two is measured too; all hosts must have this folder,
    as in training.

    Raises ConfigError or MemoryFitError for a recipe that cannot run here, PreflightError if the timings give no
    calibration, and RankError if a rank fails.
    """
    job = Job(config)
    check_cluster(job, gpus)
    ranks = min(gpus, 2) or 2
    # Hosts share this folder, not that of temporary files.
    with _folder(Path.cwd() if config.cluster.hostfile else None) as folder:
        ours = measuring(config, ranks, folder.root)
        write_folder(ours, folder)
        # Each rank has as many threads as in training, where `ranks_per_node` ranks share the cores.
        own_cores = max((os.cpu_count() or 1) // config.cluster.ranks_per_node, 1)
        threads = os.environ.get("OMP_NUM_THREADS") or str(own_cores)
        nodes, network = job.cluster.nodes, None
        if config.cluster.hostfile is not None and len(nodes) > 1:  # first, because it fails sooner
            say(f"measuring messages between {nodes[0].host} and {nodes[1].host}")
            arguments = "network", str(folder.root), str(nodes[0].devices)
            _run(Job(ours, nodes[:2]), folder, arguments, threads)
            network = read_network(folder.root / NETWORK)
        # Everything else is measured on this machine alone: its rates do not depend on other hosts.
        layers, on = counted(ours.model.layers, "layer"), counted(ranks, "GPU rank" if gpus else "CPU rank")
        say(f"measuring model={ours.model.name} with {layers} on {on}")
        _run(Job(ours), folder, ("machine", str(folder.root), str(seconds)), threads)
        measured = replace(read(folder.root / RESULT), network=network)
    launch_bound: tuple[tuple[Case, Timing], ...] = ()
    # The reference kernel launches kernels for each sequence, so the shortest micro-batch does not measure launches.
    if uses_gpus(ours) and measured.kernel != "reference":
        measured, launch_bound = split_launch_bound(measured)
    calibration = calibrate(measured, ours)
    return Profile(calibration, measured, ours, points(measured, calibration, ours), launch_bound)


def _run(job: Job, folder: RunFolder, arguments: tuple[str, ...], threads: str) -> None:
    """Run `python -m engine.hardware` with these arguments on all ranks of a job.

    Raises RankError if one fails, and KeyboardInterrupt if the user stopped them.
    """
    commands = node_commands(job, folder, None, module=("engine.hardware", *arguments))
    works = [replace(one.work, environment={**one.work.environment, "OMP_NUM_THREADS": threads}) for one in commands]
    commands = [replace(command, work=work) for command, work in zip(commands, works, strict=True)]
    try:
        run_ranks(commands, folder, lambda: None, lambda text: None)
    except PreemptedError:
        raise KeyboardInterrupt from None  # nothing was saved, so there is nothing to resume


@contextmanager
def _folder(parent: Path | None) -> Iterator[RunFolder]:
    """Yield a temporary folder in `parent`. If a rank fails the folder is kept for its logs, otherwise removed."""
    with temporary(parent, "bytescale-hardware-", keeps=(RankError,)) as root:
        yield RunFolder(root)


def check_cluster(job: Job, gpus: int) -> None:
    """Raise PreflightError if this machine or environment cannot train as the job's config says.

    Without a GPU, CPUs would be measured instead. Fewer GPUs than the config has are enough, except with a hostfile.
    """
    config, of_gpus = job.config, None
    if uses_gpus(config) and gpus == 0:
        of_gpus = no_gpus(config)
    elif config.cluster.hostfile:
        of_gpus = gpu_problem(job)
    elif uses_gpus(config):
        of_gpus = pytorch_problem(config)
    problems = [problem for problem in (environment_problem(config, os.environ), of_gpus) if problem is not None]
    if problems:
        raise PreflightError.of(problems)
