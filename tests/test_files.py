from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.cost.datasheets import nominal
from engine.files import LOCK, append, copy, locked, new_file, write_durably, write_json


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
    (tmp_path / "metrics.jsonl").symlink_to(mine)
    with pytest.raises(OSError, match="symbolic links"):
        append(tmp_path / "metrics.jsonl")
    assert mine.read_text() == "precious"
    assert (tmp_path / "a.bin.writing").read_bytes() == b"a"


def test_a_lock_keeps_what_the_file_contains(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("notes")
    with locked(tmp_path / LOCK):
        pass
    assert (tmp_path / LOCK).read_text() == "notes"


def test_a_lock_has_the_permissions_of_the_process_that_made_it(tmp_path: Path) -> None:
    """One that was there keeps its own: it may be a file of ours that another user has renamed."""
    (tmp_path / "private").touch(0o600)
    for name, mode in (("private", 0o600), ("new", 0o664)):
        with locked(tmp_path / name, 0o664):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """Another user may have put it there; opening it would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    for use in (append, lambda path: locked(path).__enter__(), lambda path: copy(path, tmp_path / "copy")):
        with pytest.raises(OSError):
            use(tmp_path / "pipe")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(("mode", "expected"), [(0o600, 0o600), (0o640, 0o640), (0o644, 0o644), (0o666, 0o644)])
def test_a_copy_is_readable_by_those_who_may_read_the_original(tmp_path: Path, mode: int, expected: int) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 1000)
    (tmp_path / "a").chmod(mode)
    copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"abc" * 1000
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == expected


def test_links_are_copied_from_the_cache_of_the_hub_alone(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "1", tmp_path / "models--a" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "ab12").write_text("blob")
    (tmp_path / "private").write_text("private")
    for name, target in {
        "config.json": "../../blobs/ab12",
        "absolute": blobs / "ab12",
        "private": "../../../private",
        "of a blob": "../../blobs/link",
    }.items():
        (snapshot / name).symlink_to(target)
    (blobs / "link").symlink_to("../../private")
    copy(snapshot / "config.json", tmp_path / "config.json")
    assert (tmp_path / "config.json").read_text() == "blob"
    for name in ("absolute", "private", "of a blob"):
        with pytest.raises(OSError, match="symbolic links"):
            copy(snapshot / name, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
