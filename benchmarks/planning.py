"""Speed and quality of the planners: planning time, balance, hops, and makespan / lower bound.

    python benchmarks/planning.py [PLANNER] [--sizes RANKS/SEQUENCES] [--seeds 8] [--mode lockstep] [--json]

Terms are defined in docs/planner.md. Planning times include verification; they are processor times, medians of five
runs after a warm-up.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from benchmarks.traces import TRACES, compute_only, draw, settings_of
from engine.planner.adaptive.workload import lower_bound
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.planners import PLANNERS
from engine.planner.settings import PlanSettings
from engine.simulator.timeline import simulate, useful
from engine.units import Ints

SIZES = ("64/512", "512/4096", "1024/8192", "16384/131072")
LARGE = 4096  # from this many ranks on, the baselines are measured with one seed and one repetition
FIRST = "from benchmarks.planning import *; measure('adaptive', 'github', 512, 4096, 0, 'free', 1)"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--mode", choices=("free", "lockstep"), default="free")


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    for size in arguments.sizes.split(","):
        ranks, sequences = (int(number) for number in size.split("/"))
        for planner in PLANNERS:
            for trace in TRACES:
                seeds = 1 if ranks >= LARGE and planner != "adaptive" else arguments.seeds
                yield f"{planner}/{trace}", partial(rows, planner, trace, ranks, sequences, seeds, arguments.mode)


def rows(*of: Any) -> Iterator[driver.Row]:
    yield row(*of)


def summary(rows: list[driver.Row]) -> driver.Row:
    """The processor time of the first plan in a new process, and how adaptive compares with the best of the others."""
    return {"first_plan_s": first_plan(), "over_others": over_others(rows)}


def row(planner: str, trace: str, ranks: int, sequences: int, seeds: int, mode: str) -> dict[str, Any]:
    """Measure a planner over the seeds: medians, geometric means (`balance`, `over_bound`) and worst values."""
    repeats = 1 if ranks >= LARGE and planner != "adaptive" else 5
    found = [measure(planner, trace, ranks, sequences, seed, mode, repeats) for seed in range(seeds)]
    columns = {name: np.array([one[name] for one in found]) for name in found[0]}
    return {
        "planner": planner,
        "trace": trace,
        "ranks": ranks,
        "sequences": sequences,
        "ms": float(np.median(columns["ms"])),
        "balance": geometric(columns["balance"]),
        "balance_worst": float(columns["balance"].min()),
        "hops": float(np.median(columns["hops"])),
        "over_bound": geometric(columns["over_bound"]),
        "over_bound_worst": float(columns["over_bound"].max()),
        "slots": float(np.median(columns["slots"])),
        "makespans_s": [round(seconds, 6) for seconds in columns["makespan_s"].tolist()],
    }


def over_others(rows: list[dict[str, Any]]) -> float | None:
    """Makespan of `adaptive` / shortest makespan of the other planners, in the worst step of all rows.

    None if no other planner was measured.
    """
    worst = []
    for ours in (row for row in rows if row["planner"] == "adaptive"):
        cell = [row for row in rows if all(row[key] == ours[key] for key in ("trace", "ranks", "sequences"))]
        others = [row["makespans_s"] for row in cell if row is not ours]
        worst += [mine / min(best) for mine, *best in zip(ours["makespans_s"], *others, strict=False) if best]
    return max(worst, default=None)


def measure(
    planner: str, trace: str, ranks: int, sequences: int, seed: int, mode: str, repeats: int
) -> dict[str, float]:
    """Measure one step: time, makespan and bound with communication and offload; the rest for compute only."""
    settings = settings_of(trace, ranks, mode).by(planner)
    lengths = draw(trace, ranks, sequences, seed)
    times = []
    for turn in range(repeats + (repeats > 1)):
        started = time.process_time()
        plan = plan_step(lengths, settings)
        if turn or repeats == 1:  # the first one warms up
            times.append(time.process_time() - started)
    plain = compute_only(settings)
    even = plan_step(lengths, plain)
    makespan = simulate(plan, settings).makespan
    return {
        "ms": 1e3 * float(np.median(times)),
        "balance": useful(lengths, plain) / simulate(even, plain).makespan,
        "hops": hops(even, plain),
        "makespan_s": makespan / 1e9,
        "over_bound": makespan / lower_bound(lengths, settings),
        "slots": (int(even.slot.max()) + 1) / least_slots(lengths, plain),
    }


def hops(plan: StepPlan, settings: PlanSettings) -> float:
    """Sum of tokens x (degree - 1), divided by the same sum at the needed degrees; 1 if both are 0."""
    work = settings.costs.sequence(plan.sequence_lengths)
    needed = np.maximum(-(-plan.lengths // plan.capacity), np.ceil(work / (work.sum() / plan.ranks)).astype(np.int64))
    least = int((plan.lengths * (np.minimum(needed, plan.ranks) - 1)).sum())
    made = int((plan.lengths * (plan.degrees - 1)).sum())
    return made / least if least else 1.0 + made


def least_slots(lengths: Ints, settings: PlanSettings) -> int:
    """Least number of slots that hold all tokens."""
    return -(-int(lengths.sum()) // (settings.ranks * settings.capacity))


def first_plan() -> float:
    """Processor seconds of a new process that plans one step, including imports."""
    times = []
    for _ in range(2):  # the first one fills the cache
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", FIRST], check=True, cwd=Path(__file__).parent.parent)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return times[-1]


def geometric(values: Any) -> float:
    return float(np.exp(np.log(values).mean()))


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases, options, summary))
