from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import BytescaleError, ConfigError, DataError, Problem
from tests.refusals import refused


def raise_(error: BytescaleError) -> None:
    raise error


def test_kind_place_and_way_out(tmp_path: Path) -> None:
    two = [Problem("is 3", "run.steps", "set 4"), Problem("is missing", str(tmp_path / "a.jsonl"), "name another")]
    with refused(ConfigError, "run.steps", "...a.jsonl") as problems:
        raise_(ConfigError.of(two))
    assert problems == two
    with refused(DataError, hint=False, code=4):
        raise_(DataError("nothing"))
    with pytest.raises(AssertionError), refused(DataError, hint=False, code=5):
        raise_(DataError("nothing"))


@pytest.mark.parametrize(
    "error",
    [
        DataError("is 3", key="run.steps", hint="set 4"),
        ConfigError("is 3", key="run.step", hint="set 4"),
        ConfigError("is 3", key="run.steps"),
        ConfigError("is\n3", key="run.steps", hint="set 4"),
        ConfigError("3" * 400, key="run.steps", hint="set 4"),
        ConfigError.of([Problem("is 3", "run.steps", "set 4"), Problem("is 3", "run.steps", "set 4")]),
    ],
    ids=["kind", "place", "no way out", "two lines", "long", "two"],
)
def test_anything_else_fails(error: BytescaleError) -> None:
    with pytest.raises((AssertionError, DataError)), refused(ConfigError, "run.steps"):
        raise_(error)
