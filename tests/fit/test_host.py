from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.cluster.hostfile import Node
from engine.config.load import load
from engine.config.schema import Config
from engine.fit import host as host_memory
from engine.fit.estimate import most_on_host
from engine.fit.host import host_problem, tight, waits_for_checkpoints
from engine.job import Job
from engine.planner.plan.step_plan import StepPlan
from tests.planner.samples import by_hand

HERE = (Node("localhost", 2),)
TWO = (Node("localhost", 2), Node("elsewhere.example", 2))


def config(*keys: str) -> Config:
    return load(["recipe=quickstart", "model.layers=4", *keys])


def plan(ratio: float) -> StepPlan:
    """A plan of two ranks with at most 30 tokens each; two of the four layers may be offloaded."""
    made = by_hand([30, 20], [(0,), (1,)], [[[0]], [[1]]])
    return replace(made, offload=np.full_like(made.offload, round(ratio * 1e6)))


def free(monkeypatch: pytest.MonkeyPatch, bytes_: int | None) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: bytes_)


def test_what_two_ranks_offload_must_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 2 * 15 * Job(config()).costs.token_bytes
    free(monkeypatch, needed)
    assert host_problem([plan(0.0), plan(1.0)], Job(config(), HERE)) is None
    free(monkeypatch, needed - 1)
    problem = host_problem([plan(0.0), plan(1.0)], Job(config(), HERE))
    assert problem is not None and problem.key == "offload.ratio"
    needs, has = problem.message.split(", ", 1)[1].split(" for 2 ranks, but only ")
    assert needs not in has and has.endswith("KiB of this machine's memory is available")
    assert host_problem([plan(0.5)], Job(config(), HERE)) is None


@pytest.mark.parametrize(
    ("nodes", "key", "hint"),
    [
        (
            HERE,
            "optimizer.on_host",
            "set optimizer.on_host=false, or stop other processes that use memory here, or shard",
        ),
        (TWO, "cluster.ranks_per_node", "use more machines, or set optimizer.on_host=false"),
    ],
)
def test_model_states_that_wait_there_count_too(
    nodes: tuple[Node, ...], key: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More machines shard the states if there are several; else the hint is about this machine."""
    asked = config("optimizer.on_host=true")
    needed = 2 * Job(asked, nodes).costs.host_fixed_bytes
    free(monkeypatch, needed)
    assert host_problem([], Job(asked, nodes)) is None
    free(monkeypatch, needed - 1)
    problem = host_problem([], Job(asked, nodes))
    assert problem is not None and problem.key == key and str(problem.hint).startswith(hint)


def test_other_machines_and_silent_systems_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 0)
    assert host_problem([plan(1.0)], Job(config(), (Node("elsewhere.example", 2),))) is None
    free(monkeypatch, None)
    assert host_problem([plan(1.0)], Job(config(), HERE)) is None


def test_a_later_step_that_may_want_more_than_is_free_is_told_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(["recipe=quickstart", "model.layers=8", "context=2K", "capacity=1K", "offload.ratio=auto"])
    free(monkeypatch, 2**20)
    told = tight(Job(config, HERE))
    assert (
        told is not None
        and "1.0 MiB of this machine" in told
        and told.endswith("lower cluster.host_memory to plan with less")
    )
    free(monkeypatch, 2**40)
    assert tight(Job(config, HERE)) is None


def test_copies_of_the_states_are_made_if_half_of_what_is_free_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["model.layers=16", "offload.ratio=0"]  # states of more than 1 MiB, the least host memory that is accepted
    plain = config(*keys)
    copy = most_on_host(Job(plain)).host
    assert copy > 0
    free(monkeypatch, 4 * copy)
    assert waits_for_checkpoints(Job(plain, HERE)) is None and tight(Job(plain, HERE)) is None
    free(monkeypatch, 4 * copy - 1)
    told = waits_for_checkpoints(Job(plain, HERE))
    assert told is not None and told.startswith("training will wait while a checkpoint is written: half of the ")
    free(monkeypatch, 0)
    assert tight(Job(plain, HERE)) is None, "nothing is copied then"
    small = config(*keys, f"cluster.host_memory={copy - 1}")
    for available in (None, 2**40):
        free(monkeypatch, available)
        told = waits_for_checkpoints(Job(small, HERE))
        assert told is not None and "cluster.host_memory=" in told and "is too small for a copy of the states" in told
