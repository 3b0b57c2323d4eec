from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.data.sources.files import kind, reading
from engine.errors import DataError


def test_kind_distinguishes_folders_files_and_missing_paths(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert kind(tmp_path) == "folder"
    assert kind(tmp_path / "file") == "file"
    assert kind(tmp_path / "other") == "missing"
    assert kind(tmp_path / "file" / "below") == "missing"


def test_kind_refuses_a_path_that_the_system_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: File name too long"):
        kind(tmp_path / ("x" * 1000))


def test_reading_names_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file") as caught, reading(tmp_path / "a.txt"):
        pass
    (problem,) = caught.value.problems
    assert (problem.key, problem.hint) == (str(tmp_path / "a.txt"), "choose a path that this user can read")


def test_reading_refuses_a_pipe_instead_of_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is not a regular file"), reading(tmp_path / "pipe"):
        pass


def test_reading_names_a_file_that_fails_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="cannot be read: Input/output error"), reading(tmp_path / "a.txt"):
        raise OSError(5, "Input/output error")
