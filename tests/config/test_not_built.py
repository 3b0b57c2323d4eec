"""Values that are not supported yet are refused by name, all at once."""

from __future__ import annotations

import pytest

from engine.config.load import load
from engine.config.not_built import not_built, not_trained
from engine.errors import Problem

TRAINED = [
    "zero.stage=2",
    "zero.stage=3",
    "offload.ratio=0.5",
    "planner.mode=lockstep",
    "offload.ratio=auto",
    "offload.ratio=0",
    "lengths=byted",
    "recompute=layer",
    "recompute=layer_keep_attention",
    "optimizer.on_host=true",
    "mlp_tile=1K",
    "parallel.tp=2",
    "parallel.pp=2",
    "planner.mode=pipeline parallel.pp=2",
]


@pytest.mark.parametrize("override", TRAINED)
def test_a_value_that_can_be_trained_with_is_no_problem(override: str) -> None:
    assert not_trained(load([*override.split(), "cluster.ranks_per_node=4"])) == []


def test_values_that_can_only_be_planned_with_are_refused_all_at_once() -> None:
    mesh = ["parallel.tp=2", "cluster.ranks_per_node=8"]
    first, second = not_trained(load(["model.experts=4", "parallel.pp=2", *mesh]))
    hint = "train with parallel.tp=1; `bytescale plan` accepts parallel.tp=2"
    message = "2 is supported for planning models with experts, but not for training them yet"
    assert first == Problem(message, "parallel.tp", hint)
    assert second.key == "parallel.pp"
    (third,) = not_trained(load(["zero.stage=3", *mesh]))
    assert third.key == "zero.stage"


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("data.runtime", "ray", True),
        ("data.runtime", "rya", False),
        ("parallel.ep", 2, True),
        ("parallel.ep", 1, False),
        ("parallel.ep", True, False),
        ("parallel.ep", "2", False),
    ],
)
def test_a_mistake_is_not_taken_for_a_value_to_come(key: str, value: object, refused: bool) -> None:
    problem = not_built(key, value, "local")
    assert (problem is not None) is refused
    assert problem is None or problem.message == f"{value} is not implemented yet"
