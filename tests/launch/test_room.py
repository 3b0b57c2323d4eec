from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.config.load import load
from engine.errors import MemoryFitError
from engine.launch import room
from engine.planner.plan import StepPlan
from tests.planner.samples import COSTS, by_hand

HERE = Cluster((Node("localhost", 2),), 2**40)


def plan(ratio: float) -> StepPlan:
    """Return a plan of two ranks with 30 tokens at most; half of four layers may go."""
    made = by_hand([30, 20], [(0,), (1,)], [[[0]], [[1]]])
    return replace(made, offload=np.full_like(made.offload, round(ratio * 1e6)))


def free(monkeypatch: pytest.MonkeyPatch, bytes_: int | None) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda: bytes_)


def test_what_two_ranks_offload_must_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 2 * 15 * COSTS.token_bytes
    free(monkeypatch, needed)
    room.check_room([plan(0.0), plan(1.0)], COSTS, HERE)
    free(monkeypatch, needed - 1)
    with pytest.raises(MemoryFitError, match=r"for 2 ranks, and 2\.9 KiB of this machine") as caught:
        room.check_room([plan(0.0), plan(1.0)], COSTS, HERE)
    assert caught.value.problems[0].key == "offload.ratio"
    room.check_room([plan(0.5)], COSTS, HERE)


def test_model_states_that_wait_there_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = replace(COSTS, host_fixed_bytes=5000)
    free(monkeypatch, 10_000)
    room.check_room([], costs, HERE)
    free(monkeypatch, 9_999)
    with pytest.raises(MemoryFitError) as caught:
        room.check_room([], costs, HERE)
    assert caught.value.problems[0].key == "cluster.ranks_per_node"


def test_other_machines_and_silent_systems_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 0)
    room.check_room([plan(1.0)], COSTS, Cluster((Node("elsewhere.example", 2),), 2**40))
    free(monkeypatch, None)
    room.check_room([plan(1.0)], COSTS, HERE)


def test_a_later_step_that_may_want_more_than_is_free_is_told_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(["recipe=quickstart", "model.layers=8", "context=2K", "capacity=1K", "offload.ratio=auto"])
    free(monkeypatch, 2**20)
    told = room.tight(config, HERE)
    assert told is not None and "1.0 MiB of this machine" in told and told.endswith("keep to cluster.host_memory")
    free(monkeypatch, 2**40)
    assert room.tight(config, HERE) is None
