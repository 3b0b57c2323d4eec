"""The driver: which cases run, what their rows look like, and where they were measured."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial

import pytest

from benchmarks import driver


def row(name: str) -> Iterator[driver.Row]:
    if name.startswith("a/"):
        yield {"case": name, "s": 1234.5678, "tokens": 12345, "each_s": [1.0, 2.0], "none": None}
    else:
        yield {"case": name, "holds": name != "missed"}


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    for name in ("a/one", "a/two", "ab", "missed"):
        yield name, partial(row, name)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["x/benchmark.py", *words])
    return driver.main("about", cases, summary=lambda rows: {"rows": len(rows)})


@pytest.mark.parametrize(
    ("words", "names"), [(["a"], ["a/one", "a/two"]), (["ab", "a/two"], ["a/two", "ab"]), (["a/one"], ["a/one"])]
)
def test_a_case_stands_for_those_below_it(
    words: list[str], names: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["case"] for one in found["rows"]] == names
    assert found["summary"] == {"rows": len(names)}
    assert found["command"] == f"python benchmark.py {' '.join(words)} --json"
    assert found["machine"] and found["date"] and "commit" in found


def test_rows_are_tables_with_a_header_where_columns_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "a", "ab") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["| case | s | tokens | none |", "|---|---|---|---|", "| a/one | 1235 | 12,345 |  |", lines[3]]
    assert lines[5:8] == ["| case | holds |", "|---|---|", "| ab | True |"]


def test_a_missed_target_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch) == driver.MISSED
    assert run(monkeypatch, "ab") == 0


def test_an_unknown_case_is_refused_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(monkeypatch, "b")
    assert caught.value.code == 2
    assert "a/one, a/two, ab, missed" in capsys.readouterr().err
