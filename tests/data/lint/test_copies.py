"""Copies are found exactly, in any number of passes and in whatever files the records are."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.data.lint import copies
from engine.data.lint.copies import RECORD, find_copies, record, write_records


def reference(contents: list[int], examples: int) -> tuple[int, list[tuple[int, int]]]:
    first: dict[int, int] = {}
    found = [(number, first[one]) for number, one in enumerate(contents) if first.setdefault(one, number) != number]
    return len(found), found[:examples]


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), max_size=60), st.integers(1, 70), st.integers(1, 7), st.randoms())
def test_copies_agree_with_a_dictionary(contents: list[int], held: int, read: int, random: object) -> None:
    """In up to 64 passes over two files, with records in any order."""
    records = [record(b"%d" % one, number) for number, one in enumerate(contents)]
    random.shuffle(records)  # type: ignore[attr-defined]
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_SORTED", held)
        patch.setattr(copies, "_CHUNK", read)
        for process, part in enumerate((records[::2], records[1::2])):
            patch.setattr(copies.os, "getpid", lambda process=process: process)
            write_records(Path(name), part)
        assert find_copies(Path(name), examples=4) == reference(contents, 4)


def test_a_hash_is_compared_as_a_whole(tmp_path: Path) -> None:
    """Three documents agree in the first half of their hashes, two of them in both."""
    found = np.array([(7, 1, 30), (7, 2, 20), (7, 1, 10), (8, 1, 5)], dtype=RECORD)
    write_records(tmp_path, [found.tobytes()])
    assert find_copies(tmp_path, 5) == (1, [(30, 10)])


def test_a_pass_holds_a_bounded_number_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_SORTED", 1000)
    write_records(tmp_path, [record(b"%d" % (number // 2), number) for number in range(20_000)])
    sizes, original = list[int](), copies._copies
    monkeypatch.setattr(copies, "_copies", lambda records: sizes.append(len(records)) or original(records))
    assert find_copies(tmp_path, 3) == (10_000, [(1, 0), (3, 2), (5, 4)])
    assert len(sizes) == 32 and max(sizes) <= 1000


def test_no_documents_have_no_copies(tmp_path: Path) -> None:
    assert find_copies(tmp_path, 5) == (0, [])
