"""Measures plans of `adaptive` for a mixed cluster, in which half of the nodes run at half speed.

`python benchmarks/mixed.py [--seeds 8]` prints the makespan divided by the lower bound, mean and worst over the seeds.
`blind` is the mean for plans that were made for equal ranks and run on the mixed cluster.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.traces import TRACES, draw, settings_of
from engine.cluster.cluster import Cluster
from engine.planner.adaptive.workload import lower_bound
from engine.planner.make import plan_step
from engine.planner.settings import PlanSettings
from engine.simulator.timeline import simulate


def main() -> None:
    """Print one line per size and trace."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=8)
    seeds = parser.parse_args().seeds
    for ranks, sequences in ((64, 512), (512, 4096), (1024, 8192)):
        for trace in TRACES:
            found = np.array([measure(trace, ranks, sequences, seed) for seed in range(seeds)])
            aware, blind = found.T
            print(
                f"{ranks} ranks, {sequences} sequences, {trace}: {aware.mean():.4f} (worst {aware.max():.4f}), "
                f"blind {blind.mean():.2f}",
                flush=True,
            )


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
    main()
