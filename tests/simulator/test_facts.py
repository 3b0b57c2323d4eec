"""The numbers of a plan, against counts that follow the ring schedule hop by hop."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config.load import load
from engine.planner import schedule
from engine.planner.make import plan_step
from engine.planner.plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.simulator.facts import facts, max_peers, ring_bytes

CONFIG = load(["cluster.ranks_per_node=5", "context=8K", "capacity=2K"])
SETTINGS = PlanSettings.of(CONFIG)
COSTS = SETTINGS.costs
LENGTHS = np.array([1, 2, 4097, 8192, 300, 6001, 2048, 2049, 10], dtype=np.int64)


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    return plan_step(LENGTHS, PlanSettings.of(CONFIG))


def counted_bytes(plan: StepPlan) -> int:
    """Add up every transfer of every part in every round."""
    hop = {"kv": COSTS.forward_hop_bytes, "dkv": COSTS.backward_hop_bytes}
    total = 0
    for length, degree in zip(plan.lengths.tolist(), plan.degrees.tolist(), strict=True):
        for direction in ("forward", "backward"):
            for round_ in range(schedule.rounds(degree, direction)):
                for part in range(degree):
                    for transfer in schedule.transfers(degree, part, round_, direction):
                        total += schedule.shard_tokens(length, degree, transfer.send) * hop[transfer.kind]
    return total


def counted_peers(plan: StepPlan) -> int:
    peers: dict[int, set[int]] = {rank: set() for rank in range(plan.ranks)}
    for sequence in range(plan.sequences):
        ring = plan.ring(sequence)
        for part, rank in enumerate(ring):
            peers[rank] |= {ring[part - 1], ring[(part + 1) % len(ring)]} - {rank}
    return max(map(len, peers.values()))


def test_ring_bytes_are_those_of_the_schedule(plan: StepPlan) -> None:
    assert int(plan.degrees.max()) >= 4
    assert sum(ring_bytes(plan, SETTINGS)) == counted_bytes(plan)


def test_peers_are_the_neighbours_in_all_rings(plan: StepPlan) -> None:
    assert max_peers(plan) == counted_peers(plan) > 1


def test_without_rings_nothing_moves() -> None:
    plan = plan_step(np.array([5, 7], dtype=np.int64), PlanSettings.of(CONFIG))
    assert (ring_bytes(plan, SETTINGS), max_peers(plan)) == ((0, 0), 0)


def test_facts(plan: StepPlan) -> None:
    found = facts(plan, SETTINGS)
    assert (found["ranks"], found["sequences"], found["tokens"]) == (5, 9, int(LENGTHS.sum()))
    assert found["lower_bound_s"] <= found["makespan_s"]
    work = COSTS.seconds(int(COSTS.sequence(LENGTHS).sum())) / 5
    assert found["balance"] == pytest.approx(work / float(found["makespan_s"]))
    assert found["lower_bound_s"] >= work
