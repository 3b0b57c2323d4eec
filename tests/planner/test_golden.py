"""Plans of all planners are golden: their digests, and the time that their step takes, in ns.

Differential tests prove that plans are valid. These hold every choice of a planner: a change that must not alter plans
leaves the files as they are; any other shows which plans it alters, and whether their steps become shorter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.planner.make import plan_step
from engine.planner.planners import PLANNERS
from engine.planner.settings import PlanSettings
from engine.simulator.timeline import simulate
from engine.units import PPM, Ints
from tests.accepted import accepted, accepted_names
from tests.planner.samples import LINKED_COSTS, ints, settings, staged_costs

GOLDEN = Path(__file__).parent / "golden"
STAGES = {"free": 1, "lockstep": 1, "pipeline": 3}
CAPACITY = 64


def drawn(count: int, longest: int, seed: int = 0) -> Ints:
    """Lengths with a few long ones: cubes of equally spaced numbers in a mixed order. No library's generator."""
    at = np.arange(count, dtype=np.int64) + seed
    return 1 + longest * (at * 7919 % 1009) ** 3 // 1009**3


def on(*nodes: Node) -> Callable[[PlanSettings], PlanSettings]:
    return lambda asked: replace(asked, cluster=Cluster(nodes, asked.cluster.device_memory))


def with_rates(**changed: float) -> Callable[[PlanSettings], PlanSettings]:
    def change(asked: PlanSettings) -> PlanSettings:
        costs = replace(LINKED_COSTS, rates=LINKED_COSTS.rates._replace(**changed))
        return replace(asked, costs=staged_costs(asked.stages, costs))

    return change


def memory(asked: PlanSettings) -> int:
    """Memory of a device that holds 40 tokens."""
    return int(asked.costs.peak_bytes(ints(40), ints(40))[0])


def offloading(asked: PlanSettings) -> PlanSettings:
    cluster = replace(asked.cluster, device_memory=memory(asked))
    return replace(asked, cluster=cluster, capacity=CAPACITY - 9, offload=PPM, host_memory=2**40)


def with_a_small_node(asked: PlanSettings) -> PlanSettings:
    return on(Node("a", 5, memory=memory(asked)), Node("b", 6))(asked)


# Settings and the lengths of a step; on two nodes of six ranks, unless a case says otherwise.
CASES: dict[str, tuple[Callable[[PlanSettings], PlanSettings], Ints]] = {
    "plain": (lambda asked: asked, drawn(120, 600)),
    "one node": (on(Node("a", 7)), drawn(90, 400, 3)),
    "few": (lambda asked: asked, drawn(9, 700, 5)),
    "later": (lambda asked: asked, drawn(20, 600, 9)),  # a ring that may end later has fewer ranks
    "gaps": (lambda asked: asked, np.concatenate([ints(507, 411, 314, 218), drawn(200, 60, 2)])),  # before rings
    "many": (lambda asked: asked, drawn(4200, 60)),
    "offload": (offloading, drawn(120, 600, 1)),
    "two speeds": (on(Node("a", 5), Node("b", 6, speed=60)), drawn(120, 500, 2)),
    "small node": (with_a_small_node, drawn(120, 400, 4)),
    "window": (with_rates(windowed=0.5, window=30.0), drawn(120, 600, 6)),
    "teams": (with_rates(team=4), drawn(40, 768, 7)),
}


def plans(planner: str) -> dict[str, str]:
    """The digest of a planner's plan and the time of its step, by case and mode."""
    found = {}
    for case, (change, lengths) in CASES.items():
        for mode, stages in STAGES.items():
            usual = settings(planner, 12, CAPACITY, mode, max_peers=8, stages=stages)
            usual = on(Node("a", 6), Node("b", 6))(replace(usual, costs=staged_costs(stages, LINKED_COSTS)))
            asked = change(usual)
            plan = plan_step(lengths, asked)
            found[f"{case}, {mode}"] = f"{plan.digest} {simulate(plan, asked).makespan:.0f}"
    return found


@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_are_golden(planner: str) -> None:
    accepted(GOLDEN / f"{planner}.json", json.dumps(plans(planner), indent=1) + "\n")


def test_only_plans_of_planners_are_golden() -> None:
    accepted_names(GOLDEN, [f"{planner}.json" for planner in PLANNERS])
