from __future__ import annotations

import pytest

from engine.config.load import load
from engine.errors import ConfigError
from engine.launch.run import train
from engine.launch.unbuilt import unbuilt

PLANNED = [
    "parallel.tp=2",
    "parallel.pp=2",
    "cluster.ranks_per_node=8",
]


TAKEN = [
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
]


@pytest.mark.parametrize("taken", TAKEN)
def test_what_training_takes_is_no_problem(taken: str) -> None:
    assert unbuilt(load([taken])) == []


def test_what_can_only_be_planned_is_refused_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        train(load(PLANNED))
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["parallel.tp", "parallel.pp"]
    first = caught.value.problems[0]
    assert first.message == "2 can be planned but not trained yet"
    assert first.hint == "train with parallel.tp=1; `bytescale plan` takes it"


def test_stages_of_a_pipeline_are_refused() -> None:
    asked = ["planner.mode=pipeline", "parallel.pp=2", "cluster.ranks_per_node=4"]
    assert [problem.key for problem in unbuilt(load(asked))] == ["parallel.pp"]
