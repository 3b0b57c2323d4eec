from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import schema
from engine.data import scan as module
from engine.data.opening import list_blocks, open_sources
from engine.data.scan import Documents, scan
from engine.data.sources import folder, jsonl, source
from engine.data.sources.jsonl import lines
from engine.data.workers import StoppedError, in_processes
from engine.errors import DataError
from tests.refusals import refused

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]
MANY = {f"{number:03d}.txt": b"x" * (number % 50) for number in range(150)}


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: 1)


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: 2)


def write_lines(path: Path, sizes: Sequence[int]) -> Path:
    """Write one document per line, and a blank line after every tenth."""
    with path.open("w", encoding="utf-8") as file:
        for number, size in enumerate(sizes):
            file.write(json.dumps({"text": "é" * (size // 2)}) + "\n" * (2 if number % 10 == 9 else 1))
    return path


def agrees(found: Documents, data: schema.Data) -> None:
    """Compare a scan with the packed blocks."""
    ((corpus,), _) = open_sources(data, list_blocks(data))
    blocks = [corpus.lengths(block) for block in range(corpus.blocks)]
    np.testing.assert_array_equal(found.lengths, np.concatenate([block.inputs() for block in blocks]))
    assert (found.empty, found.fraction) == (sum(len(block.left_out.empty) for block in blocks if block.left_out), 1.0)


@pytest.mark.parametrize("processes", ["one_process", "two_processes"])
def test_a_scan_of_a_folder_agrees_with_its_corpus(
    processes: str, request: pytest.FixtureRequest, write_files: WriteFiles, make_data: MakeData
) -> None:
    request.getfixturevalue(processes)
    data = make_data(write_files(MANY))
    agrees(scan(data, None, seed=0), data)


@pytest.mark.parametrize("processes", ["one_process", "two_processes"])
def test_a_scan_of_a_jsonl_file_agrees_with_its_corpus(
    processes: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    make_data: MakeData,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request.getfixturevalue(processes)
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 100)
    data = make_data(write_lines(tmp_path / "a.jsonl", range(0, 80, 2)), format="jsonl")
    agrees(scan(data, None, seed=0), data)


@given(st.lists(st.sampled_from([b"\n", b"a", b"bc", b"defgh\n"]), max_size=40), st.integers(1, 20))
def test_every_line_belongs_to_the_range_in_which_it_begins(chunks: list[bytes], step: int) -> None:
    text = b"".join(chunks)
    ranges = [(start, min(len(text), start + step)) for start in range(0, len(text), step)]
    found = [(start, stop, at, line) for start, stop in ranges for at, line in lines(io.BytesIO(text), start, stop)]
    assert [line for *_, line in found] == text.splitlines(keepends=True)
    assert all(start <= at < stop and text[at:].startswith(line) for start, stop, at, line in found)


def test_a_range_inside_a_line_is_not_read_beyond(tmp_path: Path) -> None:
    """Otherwise each range within a line of gigabytes would read it to its end."""

    class Counted(io.BytesIO):
        read_bytes = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            self.read_bytes += len(line)
            return line

    file = Counted(b"x" * 10_000 + b"\n")
    assert list(lines(file, 100, 200)) == []
    assert file.read_bytes <= 101


@pytest.mark.usefixtures("one_process")
def test_a_sample_of_a_folder(write_files: WriteFiles, make_data: MakeData) -> None:
    data = make_data(write_files({f"{n:03d}": b"x" * n for n in range(1, 151)}))
    found, again, other = (scan(data, 30, seed).lengths.tolist() for seed in (1, 1, 2))
    assert found == again != other
    assert len(set(found)) == 30
    assert scan(data, 30, seed=1).fraction == 30 / 150
    assert scan(data, 1000, seed=1).fraction == 1.0


@pytest.mark.long
@pytest.mark.usefixtures("one_process")
def test_a_sample_of_a_jsonl_file_has_no_bias(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long lines are as likely as short ones at any position: first all short ones, then all long ones."""
    monkeypatch.setattr(jsonl, "_SAMPLED_BYTES", 256)
    data = make_data(write_lines(tmp_path / "a.jsonl", [10] * 500 + [400] * 100), format="jsonl")
    found = [scan(data, 100, seed) for seed in range(60)]
    short = [int((some.lengths == 11).sum()) / some.fraction for some in found]
    long = [int((some.lengths == 401).sum()) / some.fraction for some in found]
    assert np.mean(short) == pytest.approx(500, rel=0.1)
    assert np.mean(long) == pytest.approx(100, rel=0.1)
    assert np.mean([len(some.lengths) for some in found]) == pytest.approx(100, rel=0.35)
    assert scan(data, 100, seed=3).lengths.tolist() == found[3].lengths.tolist()


@pytest.mark.usefixtures("one_process")
def test_large_sources_are_sampled_by_default(
    write_files: WriteFiles, tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_MOST_FILES", 40)
    monkeypatch.setattr(source, "_MOST_BYTES", 1024)
    monkeypatch.setattr(jsonl, "_SAMPLED_BYTES", 64)
    assert scan(make_data(write_files(MANY)), None, seed=0).fraction == 40 / 150
    path = write_lines(tmp_path / "a.jsonl", [20] * 400)
    found = scan(make_data(path, format="jsonl"), None, seed=0)
    assert found.fraction == pytest.approx(1024 / path.stat().st_size, rel=0.1)
    assert 1 < len(found.lengths) < 100


def test_progress_ends_at_one(write_files: WriteFiles, make_data: MakeData) -> None:
    reported: list[float] = []
    scan(make_data(write_files(MANY)), None, 0, reported.append)
    assert reported == [1 / 3, 2 / 3, 1.0]


def test_a_wrong_line_is_named_by_its_number(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch, two_processes: None
) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 64)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n\n' * 20 + '{"words": "a"}\n' + '{"text": "a"}\n' * 20, encoding="utf-8")
    with refused(DataError, f"{tmp_path}/a.jsonl:41") as problems:
        scan(make_data(path, format="jsonl"), None, seed=0)
    assert "'text'" in problems[0].message
    assert problems[0].key == f"{path}:41"


def test_a_file_that_is_not_text_is_named(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"a": b"a", "b": b"caf\xe9"})
    with refused(DataError, ".../documents/b") as problems:
        scan(make_data(root), None, seed=0)
    assert problems[0].key == str(root / "b")


@pytest.mark.parametrize("sample", [None, 5])
def test_nothing_to_measure_is_refused(
    sample: int | None, write_files: WriteFiles, tmp_path: Path, make_data: MakeData
) -> None:
    with refused(DataError, f"{tmp_path}/documents"):
        scan(make_data(write_files({"a": b"", "b": b""})), sample, seed=0)
    (tmp_path / "a.jsonl").write_bytes(b"")
    with refused(DataError, f"{tmp_path}/a.jsonl"):
        scan(make_data(tmp_path / "a.jsonl", format="jsonl"), sample, seed=0)
    with refused(DataError, f"{tmp_path}/b.jsonl"):
        scan(make_data(tmp_path / "b.jsonl", format="jsonl"), sample, seed=0)


class Deadly:
    """Kills the process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        return os._exit, (1,)


def test_a_killed_process_is_reported() -> None:
    with pytest.raises(DataError, match="was killed"):
        list(in_processes(str, [Deadly(), Deadly()], 2, "close other programs"))


def stop_this_process() -> str:
    os.kill(os.getpid(), signal.SIGSTOP)
    return "continued"


class Stopped:
    def __reduce__(self) -> tuple[Callable[[], str], tuple[()]]:
        return stop_this_process, ()


@pytest.mark.long
def test_a_stopped_process_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the caller waiting for ever. The others are not left behind, either."""
    monkeypatch.setattr("engine.control.processes.STOPPED_S", 0.5)
    before = set(psutil.Process().children())
    with pytest.raises(StoppedError, match="was stopped by a signal") as caught:
        list(in_processes(str, [Stopped(), 2], 2, "close other programs"))
    assert caught.value.code == 124
    left = list[psutil.Process]()
    for child in set(psutil.Process().children()) - before:
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if "resource_tracker" not in str(child.cmdline()):
                left.append(child)
    assert not psutil.wait_procs(left, timeout=10)[1]
