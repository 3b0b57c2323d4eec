"""Measures plans of `adaptive` for a mixed cluster, in which half of the nodes run at half speed.

`python benchmarks/mixed.py [--seeds 8]` prints the makespan divided by the lower bound, mean and worst over the seeds.
`blind` is the mean for plans that were made for equal ranks and run on the mixed cluster.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from benchmarks.traces import TRACES, draw, settings_of
from engine.cluster.cluster import Cluster
from engine.planner.adaptive.workload import lower_bound
from engine.planner.make import plan_step
from engine.planner.settings import PlanSettings
from engine.simulator.timeline import simulate


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=8)


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    for ranks, sequences in ((64, 512), (512, 4096), (1024, 8192)):
        for trace in TRACES:
            yield f"{ranks}/{trace}", partial(row, trace, ranks, sequences, arguments.seeds)


def row(trace: str, ranks: int, sequences: int, seeds: int) -> Iterator[driver.Row]:
    """Yield the means over the seeds of a trace."""
    aware, blind = np.array([measure(trace, ranks, sequences, seed) for seed in range(seeds)]).T
    figures = {"over_bound": aware.mean(), "worst": aware.max(), "blind": blind.mean()}
    yield {"ranks": ranks, "sequences": sequences, "trace": trace} | {k: float(one) for k, one in figures.items()}


def measure(trace: str, ranks: int, sequences: int, seed: int) -> tuple[float, float]:
    """Makespan / lower bound on the mixed cluster, of a plan made for it and of a plan made for equal ranks."""
    equal = settings_of(trace, ranks)
    mixed = replace(equal, cluster=slowed(equal.cluster))
    lengths = draw(trace, ranks, sequences, seed)
    bound = lower_bound(lengths, mixed)
    return makespan(mixed, lengths, mixed) / bound, makespan(equal, lengths, mixed) / bound


def slowed(cluster: Cluster) -> Cluster:
    """The cluster with the second half of its nodes at half speed."""
    half = len(cluster.nodes) // 2
    slow = tuple(replace(node, speed=50) for node in cluster.nodes[half:])
    return replace(cluster, nodes=cluster.nodes[:half] + slow)


def makespan(planned: PlanSettings, lengths: np.ndarray, run: PlanSettings) -> float:
    """Simulated makespan, in ns, of a plan made with the settings `planned` and run with the settings `run`."""
    return simulate(plan_step(lengths, planned), run).makespan


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases, options))
