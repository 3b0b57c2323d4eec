from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.cost.datasheets import nominal
from engine.files import write_durably
from engine.trainer.folder import write_json


def write_calibration(path: Path) -> None:
    replace(nominal("local"), device="another").write(path)


@pytest.mark.parametrize(
    "write", [lambda path: write_durably(path, b"new"), lambda path: write_json(path, {"new": 1}), write_calibration]
)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whatever is written for others to read: a run's state, a calibration."""

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "a"
    path.write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["a"] and path.read_bytes() == b"old"
    write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["a"] and path.read_bytes() != b"old"
