from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.cost.datasheets import nominal
from engine.files import (
    LOCK,
    locked,
    locked_draft,
    new_file,
    publish,
    remove_folder,
    remove_ruins,
    write_durably,
    write_json,
)


def write_calibration(path: Path) -> None:
    replace(nominal("local"), device="another").write(path)


@pytest.mark.parametrize(
    "write", [lambda path: write_durably(path, b"new"), lambda path: write_json(path, {"new": 1}), write_calibration]
)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds for every kind of durable write: text, JSON, a calibration."""

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


def test_the_next_writer_empties_the_draft_of_a_killed_one(tmp_path: Path) -> None:
    with locked_draft(tmp_path / "a") as draft:  # never published, as after a kill
        (draft / "inner").mkdir()
        (draft / "inner" / "x").touch()
        (draft / "y").touch()
    with locked_draft(tmp_path / "a") as draft:
        assert [path.name for path in draft.iterdir()] == [LOCK]
        publish(draft, tmp_path / "a")
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"], "not even the lock stays"


def test_a_second_writer_is_refused_and_takes_nothing_from_the_first(tmp_path: Path) -> None:
    with locked_draft(tmp_path / "a") as draft:
        (draft / "x").touch()
        with pytest.raises(BlockingIOError), locked_draft(tmp_path / "a"):
            pass
        assert (draft / "x").exists()


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    final = tmp_path / "a"
    final.mkdir()
    (final / "old").touch()
    with locked_draft(final) as draft:
        (draft / "new").touch()
        with pytest.raises(OSError, match="not empty"):
            publish(draft, final)
        assert (final / "old").exists()
        (final / "old").unlink()
        publish(draft, final)
    assert list(tmp_path.rglob("*")) == [final, final / "new"]


def test_ruins_of_writers_and_removals_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted removal leaves no incomplete folder under the name that readers look for."""

    def interrupted(folder: Path) -> None:
        (folder / "x").unlink()
        raise KeyboardInterrupt

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").touch()
    with locked_draft(tmp_path / "b"):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            remove_folder(tmp_path / "a")
    assert len(list(tmp_path.iterdir())) == 2 and not (tmp_path / "a").exists()
    remove_ruins(tmp_path)
    assert not list(tmp_path.iterdir())


def test_ruins_that_are_open_on_nfs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    remove = Mock(side_effect=OSError(errno.ENOTEMPTY, "Directory not empty"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove)
        with pytest.raises(OSError):
            remove_folder(tmp_path / "a")
        remove_ruins(tmp_path)
        remove.side_effect = PermissionError(errno.EACCES, "Permission denied")
        with pytest.raises(PermissionError):
            remove_ruins(tmp_path)
    remove_ruins(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_lock_that_its_owner_removes_on_another_host_counts_as_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS an open file is gone once another host has removed it."""

    def gone(file: object, how: int) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(fcntl, "flock", gone)
    with pytest.raises(BlockingIOError), locked(tmp_path / "lock"):
        pass


def test_a_link_that_somebody_has_put_there_is_not_followed(tmp_path: Path) -> None:
    """In a folder that others may write to: a link of theirs would let us overwrite a file of our own."""
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (tmp_path / f".page.html.{os.getpid()}").symlink_to(mine)  # a name that can be guessed
    write_durably(tmp_path / "page.html", b"page")
    (tmp_path / LOCK).symlink_to(mine)
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / LOCK):
        pass
    (tmp_path / "a.bin.writing").symlink_to(mine)
    with new_file(tmp_path / "a.bin.writing") as file:
        file.write(b"a")
    assert mine.read_text() == "precious"
    assert (tmp_path / "a.bin.writing").read_bytes() == b"a"


def test_a_draft_that_another_user_has_made_is_not_emptied(tmp_path: Path) -> None:
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    mine.mkdir()
    (mine / "a").write_text("precious")
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / ".writing-hf").symlink_to(mine)
    with pytest.raises(OSError, match="another user has made this folder"), locked_draft(shared / "hf"):
        pass
    assert (mine / "a").exists()
    with locked_draft(shared / "other") as draft:  # no link
        publish(draft, shared / "other")


def test_a_lock_keeps_what_the_file_contains(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("notes")
    with locked(tmp_path / LOCK):
        pass
    assert (tmp_path / LOCK).read_text() == "notes"
