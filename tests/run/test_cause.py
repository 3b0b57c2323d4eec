"""The form of causes in files and messages stays: old run folders are read, and people read the files too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ExitCode, Problem
from engine.run.cause import Cause

OF_RANK = {"code": 10, "message": "out of memory", "key": "capacity", "hint": None, "time": 2.5}
OF_HOST = {"code": 3, "message": "beta was lost", "key": None, "hint": "check it", "whole": True}


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (Cause(ExitCode.MEMORY, Problem("out of memory", "capacity"), time=2.5), OF_RANK),
        (Cause(ExitCode.PREFLIGHT, Problem("beta was lost", hint="check it"), whole=True), OF_HOST),
    ],
)
def test_a_cause_keeps_its_form_and_comes_back(cause: Cause, text: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rank-0.error.json"
    path.write_text(json.dumps(cause.to_json()))
    assert json.loads(path.read_text()) == text
    assert Cause.of_json(text) == Cause.read(path) == cause


def test_what_an_older_version_did_not_write_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.error.json"
    path.write_text('{"message": "gone", "more": 1}')
    assert Cause.read(path) == Cause(ExitCode.BUG, Problem("gone"))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", '{"code": []}', '{"time": "noon"}', "\udcff"])
def test_a_damaged_file_tells_nothing(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.error.json"
    assert Cause.read(path) is None
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert Cause.read(path) is None
