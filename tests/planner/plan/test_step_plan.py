"""The plan's bytes, its digest and its small views."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from engine.planner.make import plan_step
from engine.planner.plan.emit import emit
from engine.planner.plan.step_plan import MicroBatch, Shard, StepPlan
from tests.planner.samples import ints, settings

IN_ANOTHER_PROCESS = """
import sys
from engine.planner.plan.step_plan import StepPlan
plan = StepPlan.from_bytes(sys.stdin.buffer.read())
print(plan.digest)
"""


def small() -> StepPlan:
    groups = [[(0, (2, 0))], [(1, (0,)), (2, (0,))]]
    return emit("by hand", "free", 3, 16, ints(9, 4, 1), groups, offload=ints(250_000, 0, 0))


def test_views_show_what_a_rank_runs() -> None:
    plan = small()
    first, second = plan.of_rank(0)
    assert first == MicroBatch(0, 0, 0, -1, (Shard(0, 9, (2, 0), 1),), offload=0.25)
    assert second.shards == (Shard(1, 4, (0,), 0), Shard(2, 1, (0,), 0))
    assert [micro.shards for micro in plan.of_rank(1)] == [()]  # a rank without work has one idle micro-batch
    assert [micro.shards[0].part for micro in plan.of_rank(2)] == [0]
    assert (plan.sequences, plan.micro_batches, plan.degrees.tolist()) == (3, 4, [2, 1, 1])


@pytest.mark.parametrize("mode", ["free", "lockstep"])
def test_bytes_round_trip(mode: str) -> None:
    plan = plan_step(ints(30, 5, 17, 1, 2), settings(mode=mode))
    again = StepPlan.from_bytes(plan.to_bytes())
    assert again.to_bytes() == plan.to_bytes()
    assert (again.planner, again.mode, again.ranks, again.capacity) == ("balanced", mode, 4, 16)
    for name, array in plan.arrays().items():
        assert np.array_equal(array, again.arrays()[name]), name


def test_a_plan_of_an_earlier_version_has_no_overlap() -> None:
    plan = small()
    head = plan.to_bytes().split(b"\n")[0]
    values, arrays = json.loads(head), plan.arrays()
    del values["sizes"]["overlap"]
    before = b"".join(array.tobytes() for name, array in arrays.items() if name != "overlap")
    again = StepPlan.from_bytes(json.dumps(values).encode() + b"\n" + before)
    assert plan.overlap.tolist() == [1, 1, 0]
    assert again.to_bytes() == replace(plan, overlap=ints(0, 0, 0)).to_bytes()


@pytest.mark.long
def test_the_digest_is_the_same_in_another_process() -> None:
    plan = plan_step(ints(30, 5, 17, 1, 2), settings())
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS]
    other = subprocess.run(command, input=plan.to_bytes(), capture_output=True, check=True)
    assert other.stdout.decode().strip() == plan.digest


def test_the_digest_sees_every_array() -> None:
    plan = replace(small(), passes=ints(0, 1))
    digests = {plan.digest}
    for name, array in plan.arrays().items():
        digests.add(StepPlan(**{**vars_of(plan), name: array + 1}).digest)
    assert len(digests) == 1 + len(plan.arrays())


def vars_of(plan: StepPlan) -> dict[str, object]:
    scalars = {name: getattr(plan, name) for name in ("planner", "mode", "stages", "ranks", "capacity")}
    return {**scalars, **plan.arrays()}
