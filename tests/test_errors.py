"""Errors keep all of their fields when they are pickled: the planning process sends them to its parent."""

from __future__ import annotations

import pickle

import pytest

from engine.errors import BytescaleError, ConfigError, DataError, PlanError, Problem


@pytest.mark.parametrize(
    "error",
    [
        PlanError(4, "a cycle"),
        DataError("gone", key="a.txt:3", hint="bring it back"),
        ConfigError("x", key="run.steps"),
    ],
)
def test_errors_survive_pickling(error: BytescaleError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert again.problems == error.problems
    assert vars(again) == vars(error)


def test_a_config_error_carries_all_mistakes() -> None:
    mistakes = [Problem("one", "a"), Problem("two", "b")]
    error = ConfigError.of(mistakes)
    assert error.problems == tuple(mistakes)
    assert str(error) == "one"
