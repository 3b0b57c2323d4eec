from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.run import launches
from engine.run.launches import begin, end, read_launches


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is 10 s later."""
    times = iter(range(1000, 2000, 10))
    monkeypatch.setattr(launches, "time", SimpleNamespace(time=lambda: float(next(times))))


def test_starts_and_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "launches.jsonl"
    assert read_launches(path) == []
    monkeypatch.setattr(sys, "argv", ["/bin/bytescale", "train", "run.out=a b"])
    begin(path, 1, 2, ["localhost"])
    (one,) = read_launches(path)
    assert (one.began, one.ended, one.step, one.ranks, one.hosts) == (1000.0, None, 1, 2, ["localhost"])
    assert one.command == "bytescale train 'run.out=a b'" and one.versions["python"] and one.versions["torch"]
    end(path, "rank 1 failed")
    begin(path, 51, 4, ["a", "b"])
    end(path)
    first, second = read_launches(path)
    assert (first.ended, first.outcome) == (1010.0, "rank 1 failed")
    assert (second.began, second.ended, second.outcome, second.hosts) == (1020.0, 1030.0, "", ["a", "b"])


def test_a_launcher_that_was_killed_leaves_a_start_without_an_end(tmp_path: Path) -> None:
    path = tmp_path / "launches.jsonl"
    begin(path, 1, 2, ["a"])
    begin(path, 1, 2, ["a"])
    end(path)
    assert [one.ended for one in read_launches(path)] == [None, 1020.0]


def test_damaged_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "launches.jsonl"
    path.write_bytes(b'{"ended": 3}\n\0\0\n[]\n7\n{"began": 1}\n')
    begin(path, 1, 2, ["a"])
    with path.open("a") as file:
        file.write('{"ended": 1, "of another version": 2}\n{"ended": 5, "outc')
    (one,) = read_launches(path)
    assert one.ended is None


def test_a_record_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    begin(tmp_path, 1, 2, ["a"])
    end(tmp_path)
