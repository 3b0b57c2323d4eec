"""Random small plans on random small clusters: from every planner in every mode, and with random rings."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.planner.make import plan_step
from engine.planner.plan.emit import emit
from engine.planner.plan.modes import lockstep, pipelined
from engine.planner.plan.step_plan import StepPlan
from engine.planner.planners import PLANNERS
from engine.planner.proof.verify import verify
from engine.planner.settings import PlanSettings
from engine.units import PPM, Ints
from tests.planner.pipelines import sliced
from tests.planner.samples import LINKED_COSTS, RATES, ints, lengths, settings, staged_costs

MODES = ("free", "lockstep", "pipeline")
CAPACITY = 16


class World(NamedTuple):
    plan: StepPlan
    settings: PlanSettings


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Draw one or two nodes of 1 to 3 devices, at full speed or slower."""
    node = st.tuples(st.integers(1, 3), st.sampled_from([100, 50, 70]))
    nodes = draw(st.lists(node, min_size=1, max_size=2))
    return Cluster(tuple(Node(f"host-{i}", devices, speed) for i, (devices, speed) in enumerate(nodes)), 2**40)


@st.composite
def asked(draw: st.DrawFn, planner: str, mode: str) -> PlanSettings:
    """Draw settings with any cluster, overlap, recompute mode, attention windows and offload."""
    cluster = draw(clusters())
    rates = RATES._replace(
        overlap=draw(st.sampled_from([0.0, 0.6, 1.0])), recompute_factor=draw(st.sampled_from([0.0, 1.0]))
    )
    stages = draw(st.integers(1, 3)) if mode == "pipeline" else 1
    rates = rates._replace(team=draw(st.sampled_from([1, 4])) if mode == "pipeline" else 1)
    rates = rates._replace(rounds_per_call=draw(st.sampled_from([1, 2, 4])))
    rates = rates._replace(window=float(draw(st.integers(1, 20))), windowed=draw(st.sampled_from([0.0, 0.5, 1.0])))
    costs = replace(LINKED_COSTS, rates=rates, nics=draw(st.sampled_from([0.5, 1.0, 2.0])))
    costs = staged_costs(stages, costs)
    return replace(
        settings(planner, cluster.ranks, CAPACITY, mode, stages=stages),
        cluster=cluster,
        costs=costs,
        max_peers=99,
        offload=draw(st.sampled_from([0, PPM])),
        host_memory=2**40,
    )


@st.composite
def planned(draw: st.DrawFn) -> World:
    """Draw a plan of any planner."""
    want = draw(asked(draw(st.sampled_from(sorted(PLANNERS))), draw(st.sampled_from(MODES))))
    step = draw(lengths(want.ranks * CAPACITY, most=9))
    return World(plan_step(ints(*step), want), want)


def _everyone(want: PlanSettings) -> Ints:
    return np.tile(np.arange(want.ranks), (want.ranks, 1))


THROWN = replace(PLANNERS["naive"], peers=_everyone)  # a planner of any rings


@st.composite
def thrown(draw: st.DrawFn) -> World:
    """Draw a plan of random rings of degrees 1 to 4, several per micro-batch, so that gangs have many rings.

    In a pipeline sequences may be cut into slices.
    """
    mode = draw(st.sampled_from(MODES))
    want = replace(draw(asked("thrown", mode)), capacity=10**6, context=10**6)
    ring = st.permutations(range(want.ranks)).flatmap(
        lambda order: st.integers(1, min(4, want.ranks)).map(lambda degree: order[:degree])
    )
    step = draw(st.lists(st.tuples(st.integers(1, 60), ring), min_size=1, max_size=9))
    cuts = sorted(draw(st.sets(st.integers(1, len(step)), max_size=4)) | {0, len(step)})
    groups = [[(at, step[at][1]) for at in range(start, stop)] for start, stop in pairwise(cuts)]
    plan = emit("thrown", "free", want.ranks, want.capacity, ints(*(length for length, _ in step)), groups)
    if mode != "free":
        plan = lockstep(plan)
    if mode == "pipeline":
        slices = draw(st.integers(1, 4))
        plan = (
            sliced(plan, slices, want.stages, draw(st.integers(0, 99))) if slices > 1 else pipelined(plan, want.stages)
        )
    with patch.dict(PLANNERS, thrown=THROWN):
        verify(plan, want)
    return World(plan, want)


worlds = st.one_of(planned(), thrown())
