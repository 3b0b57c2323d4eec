"""Compares plans of `adaptive` for small steps with the optimum, by simulated makespan.

The optimum is found by exhaustive search: any set of ranks for each sequence, each sequence in its own gang, any order
of gangs. `python benchmarks/optimum.py [--instances 500]` prints the mean, worst and best ratio adaptive / optimum.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np
from numba import njit
from numpy.random import Generator, Philox

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from engine.config.load import load
from engine.job import Job
from engine.planner.make import plan_step
from engine.planner.plan.emit import emit
from engine.planner.settings import PlanSettings
from engine.simulator.timeline import simulate
from engine.units import Floats, Ints


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instances", type=int, default=500)
    parser.add_argument("--large", type=int, default=20)


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    for ranks, sequences, instances in ((3, 5, arguments.instances), (4, 6, arguments.large)):
        yield f"{ranks}x{sequences}", partial(row, ranks, sequences, instances)


def row(ranks: int, sequences: int, instances: int) -> Iterator[driver.Row]:
    """Yield the mean, worst and best ratio of a size."""
    ratios = np.array([ratio(ranks, sequences, seed) for seed in range(instances)])
    figures = {"mean": ratios.mean(), "worst": ratios.max(), "best": ratios.min()}
    counts = {"ranks": ranks, "sequences": sequences, "instances": instances}
    yield counts | {name: float(one) for name, one in figures.items()}


def ratio(ranks: int, sequences: int, seed: int) -> float:
    """Makespan of `adaptive` / optimum, for lognormal lengths of one seed."""
    settings = small_settings(ranks)
    lengths = draw(ranks, sequences, seed, settings.capacity)
    planned = simulate(plan_step(lengths, settings), settings).makespan
    return planned / optimum(times_by_simulator(lengths, settings), least(lengths, settings), ranks)


def small_settings(ranks: int) -> PlanSettings:
    """The paper's 7B on one node of H200, without offload."""
    cluster = ["cluster=h200x8", "cluster.nodes=1", f"cluster.ranks_per_node={ranks}"]
    config = load(["recipe=llama7b-256k", *cluster, "parallel.tp=1", "context=24K", "capacity=8K"])
    return replace(Job(config).settings, offload=0)


def draw(ranks: int, sequences: int, seed: int, capacity: int) -> Ints:
    """Lognormal lengths, [sequences], of at most `ranks` (up to 3) times the capacity."""
    random = Generator(Philox(key=seed))
    return np.clip(random.lognormal(np.log(capacity), 1.0, sequences), 128, min(ranks, 3) * capacity).astype(np.int64)


def least(lengths: Ints, settings: PlanSettings) -> Ints:
    return -(-lengths // settings.capacity)


def times_by_simulator(lengths: Ints, settings: PlanSettings) -> Floats:
    """Simulated time of each sequence alone, for each degree it fits, ns, [S, P + 1]; infinite for other degrees."""
    times = np.full((len(lengths), settings.ranks + 1), np.inf)
    for at, length in enumerate(lengths):
        for degree in range(int(least(lengths, settings)[at]), settings.ranks + 1):
            alone = np.array([length])
            plan = emit("alone", "free", settings.ranks, settings.capacity, alone, [[(0, range(degree))]])
            times[at, degree] = simulate(plan, settings).makespan
    return times


def optimum(times: Floats, floors: Ints, ranks: int) -> float:
    """Least makespan over all sets of ranks and all orders, ns. `floors` [S] are the least degrees."""
    orders = np.array(list(permutations(range(len(times)))), dtype=np.int64)
    return float(_optimum(times, floors, ranks, orders))


@njit(cache=True)
def _optimum(times: Floats, floors: Ints, ranks: int, orders: Ints) -> float:
    count, subsets = len(times), (1 << ranks) - 1
    size = np.zeros(subsets + 1, np.int64)
    for subset in range(1, subsets + 1):
        size[subset] = size[subset >> 1] + (subset & 1)
    best = np.inf
    choice = np.ones(count, np.int64)
    while True:
        fits, work = True, 0.0
        for at in range(count):
            fits = fits and size[choice[at]] >= floors[at]
            work += times[at, size[choice[at]]] * size[choice[at]]
        if fits and work < best * ranks:
            for order in orders:
                best = min(best, _run(times, size, choice, order, ranks, best))
        at = 0
        while at < count and choice[at] == subsets:
            choice[at] = 1
            at += 1
        if at == count:
            return best
        choice[at] += 1


@njit(cache=True)
def _run(times: Floats, size: Ints, choice: Ints, order: Ints, ranks: int, best: float) -> float:
    height = np.zeros(ranks)
    for at in order:
        top = 0.0
        for rank in range(ranks):
            if choice[at] >> rank & 1:
                top = max(top, height[rank])
        top += times[at, size[choice[at]]]
        if top >= best:
            return best
        for rank in range(ranks):
            if choice[at] >> rank & 1:
                height[rank] = top
    return height.max()


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases, options))
