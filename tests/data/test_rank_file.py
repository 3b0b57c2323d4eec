from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.data.blocks.blocks import Range, Slice
from engine.data.rank_file import RankFile, RankHead, write_rank_file
from engine.errors import StorageError
from tests.refusals import refused

RANGES = [Range("web", 7, 12, 0, 4, 3), Range("web", 7, 12, 100, 103, 3), Range("code", 1, 0, 0, 1, 2**64 - 1)]
SLICES = [
    Slice(np.array([1, 2, 3, 4]), None),
    Slice(np.array([5, 6, 70_000]), np.array([True, False, True])),
    Slice(np.array([2**31 - 1]), None),
]
HEAD = RankHead("step-7", 3, "ab" * 16, "cd" * 16, epoch=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_rank_file(tmp_path / "step-7.3", HEAD, SLICES)
    return tmp_path / "step-7.3"


def test_ranges_are_read_in_any_order_and_twice(path: Path) -> None:
    file = RankFile.open(path, HEAD, ["web", "code"], RANGES)
    assert file.names == ["web", "code"] and file.read([]) == []
    for order in ([0, 1, 2], [2, 0], [1, 1, 1]):
        for one, at in zip(file.read([RANGES[number] for number in order]), order, strict=True):
            assert one.tokens.tolist() == SLICES[at].tokens.tolist() and one.counted is not None
            counted = SLICES[at].counted
            assert one.counted.tolist() == ([True] * len(one.tokens) if counted is None else counted.tolist())
    with pytest.raises(KeyError):
        file.read([RANGES[0]._replace(stop=5)])


def test_without_a_mask_all_tokens_count_and_without_ranges_there_are_none(tmp_path: Path) -> None:
    assert write_rank_file(tmp_path / "all", HEAD, SLICES[:1]) < write_rank_file(tmp_path / "mask", HEAD, SLICES[:2])
    (found,) = RankFile.open(tmp_path / "all", HEAD, ["web"], RANGES[:1]).read(RANGES[:1])
    assert found.counted is None
    write_rank_file(tmp_path / "idle", HEAD, [])
    assert RankFile.open(tmp_path / "idle", HEAD, ["web"], []).read([]) == []


@pytest.mark.parametrize(
    "other", [{"name": "step-8"}, {"rank": 2}, {"plan": "00" * 16}, {"ranges": "11" * 16}, {"epoch": 3}, {"epoch": 1}]
)
def test_a_file_of_another_step_rank_plan_or_epoch_is_refused(path: Path, other: dict[str, Any]) -> None:
    (key,) = other
    with refused(StorageError, str(path)) as problems:
        RankFile.open(path, replace(HEAD, **other), ["web", "code"], RANGES)
    assert key in problems[0].message


def test_a_damaged_or_missing_file_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for content in (whole[:-1], whole[:-9], b"", whole[:40] + b"\0" * (len(whole) - 40), whole[:-4] + b"\1\0\0\0"):
        path.write_bytes(content)
        with refused(StorageError, str(path)):
            RankFile.open(path, HEAD, ["web", "code"], RANGES)
    path.unlink()
    with refused(StorageError, str(path)):
        RankFile.open(path, HEAD, ["web", "code"], RANGES)


def test_a_file_that_is_open_stays_readable_when_it_is_removed_or_replaced(path: Path) -> None:
    file = RankFile.open(path, HEAD, ["web", "code"], RANGES)
    write_rank_file(path, replace(HEAD, name="step-8"), SLICES[:1])
    path.unlink()
    assert file.read(RANGES)[1].tokens.tolist() == [5, 6, 70_000]


def test_a_full_disk_leaves_the_old_file_and_no_draft(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", full)
    with refused(StorageError, str(path)):
        write_rank_file(path, HEAD, SLICES[:1])
    assert [*path.parent.iterdir()] == [path] and path.read_bytes() == before
