"""Hydra's part: what stays of it, and what it may not say."""

from __future__ import annotations

import pytest
from hydra.core.global_hydra import GlobalHydra

from engine.config.compose import compose
from engine.errors import ConfigError


def test_values_are_plain_and_resolved() -> None:
    values = compose(["run.steps=7"])
    assert type(values["run"]) is dict
    assert values["run"]["steps"] == 7
    assert values["run"]["out"] == "runs/quickstart"


def test_a_value_that_must_be_set_stays_marked() -> None:
    assert compose(["data=folder"])["data"]["path"] == "???"


def test_nothing_of_hydra_is_left_behind() -> None:
    compose([])
    assert not GlobalHydra.instance().is_initialized()


def test_an_unknown_reference_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["run.steps=3", "run.out=${nowhere}"])
    (problem,) = caught.value.problems
    assert problem.key == "run.out=${nowhere}"
