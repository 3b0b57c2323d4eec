"""What PREFIX.json says is read back, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.data.token_facts import SCHEMA, read_facts
from engine.errors import DataError
from tests.refusals import refused


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "documents": 3}', "\x00"])
def test_damaged_facts_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with refused(DataError, f"{tmp_path}/a.json"):
        read_facts(tmp_path / "a")
    assert read_facts(tmp_path / "b") is None


# Single blocks


@pytest.mark.parametrize("number", [SCHEMA + 1, 0, -1, "two", None])
def test_a_newer_format_or_one_that_never_was_is_refused_with_its_number(number: object, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"schema": number, "documents": 3}))
    with pytest.raises(DataError) as caught:
        read_facts(tmp_path / "a")
    (problem,) = caught.value.problems
    assert problem.key == str(tmp_path / "a.json") and str(number) in problem.message and problem.hint
