"""Measures the gain of each rule of `adaptive`: makespan without the rule / makespan with it.

`python benchmarks/rules.py [--seeds 4] [--mode free]` plans the steps of `traces.py` on 8, 64 and 512 ranks with 0.5 to
8 sequences per rank: on equal ranks, with half of the nodes at half speed, and without offload. It prints the geometric
mean and the largest ratio of each rule, as percentages above 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from benchmarks.mixed import slowed
from benchmarks.traces import TRACES, draw, settings_of
from engine.planner.adaptive import adaptive, free, slots
from engine.planner.adaptive.skyline import Rule
from engine.planner.adaptive.workload import Workload
from engine.planner.settings import PlanSettings
from engine.planner.time.makespan import makespan
from engine.units import Ints


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--mode", choices=("free", "lockstep"), default="free")


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    measured = list[tuple[PlanSettings, Ints, float]]()  # each step, and its makespan with all rules
    for name, change in rules(arguments.mode).items():
        yield name, partial(row, name, change, arguments, measured)


def row(name: str, change: Any, arguments: argparse.Namespace, measured: list[Any]) -> Iterator[driver.Row]:
    """Yield the gain of a rule, in percent. The first row plans all steps with all rules, for those after it, too."""
    if not measured:
        found = steps(arguments.mode, arguments.seeds)
        measured += [(settings, lengths, planned(settings, lengths)) for settings, lengths in found]
    with patch.object(*change):
        ratios = [planned(settings, lengths) / with_all for settings, lengths, with_all in measured]
    mean, most = float(np.exp(np.log(ratios).mean())), max(ratios)
    yield {"rule": name, "mean_%": 100 * (mean - 1), "most_%": 100 * (most - 1), "steps": len(ratios)}


def steps(mode: str, seeds: int) -> Iterator[tuple[PlanSettings, Ints]]:
    """Yield the settings and the sequence lengths of the steps to plan."""
    for ranks in (8, 64, 512):
        for trace in TRACES:
            equal = settings_of(trace, ranks, mode)
            kinds = [equal, equal.without_offload()]
            if ranks > 8:
                kinds.append(replace(equal, cluster=slowed(equal.cluster)))
            for per_rank in (0.5, 1, 2, 4, 8):
                for seed in range(seeds):
                    lengths = draw(trace, ranks, int(per_rank * ranks), seed)
                    yield from ((settings, lengths) for settings in kinds)


def rules(mode: str) -> dict[str, tuple[Any, str, Any]]:
    """How to disable each rule, by its name: set an attribute of a module to a value."""
    if mode == "lockstep":
        return {
            "plan of free mode in slots": (adaptive, "_FEW", 0),
            "slots at a multiple of their price": (slots, "_FEWER_SLOTS", 1.0),
        }
    tried = free.rules_of
    changes: dict[str, tuple[Any, str, Any]] = {}
    for number, rule in enumerate(free.RULES, 1):
        name = f"rule {number}, limit {rule.limit:g}, join {rule.join:g}, stretch {rule.stretch:g}"
        changes[name] = (free, "rules_of", partial(_without, rule, tried))
    return changes | {
        "plan of static": (adaptive, "_FEW_PER_RANK", 0),
        "swaps": (free, "_even_out", lambda workload, one: None),
        "joined rings": (free, "joined_ring", lambda lengths, best, holds: np.full(len(best.rank_of), -1)),
    }


def _without(rule: Rule, tried: Callable[[Workload], tuple[Rule, ...]], workload: Workload) -> tuple[Rule, ...]:
    return tuple(other for other in tried(workload) if other is not rule)


def planned(settings: PlanSettings, lengths: Ints) -> float:
    """Plan a step and return its makespan, ns."""
    return makespan(adaptive.adaptive(lengths, settings), settings)


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases, options))
