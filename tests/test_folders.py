"""Folders are written and removed through descriptors, so nothing that others put into their place is touched."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.folders import MARK, Draft, drafting, opened, opened_file, remove_folder, remove_ruins, temporary


def killed_writer(final: Path) -> Path:
    """Let a process die by SIGKILL while it writes the folder `final`; return its draft."""
    code = f"""
import os, signal
from pathlib import Path
from engine.folders import drafting
with drafting(Path({str(final)!r})) as draft:
    (draft.path / "inner").mkdir()
    (draft.path / "inner" / "x").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == -signal.SIGKILL
    (draft,) = final.parent.glob(f".writing-{final.name}.*")
    return draft


def test_a_published_folder_has_the_permissions_of_the_umask_and_its_draft_those_of_one_user(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with drafting(tmp_path / "a") as draft:
            (draft.path / "x").touch()
            (around,) = tmp_path.iterdir()
            assert around.name.startswith(".writing-a.") and stat.S_IMODE(around.stat().st_mode) == 0o700
            draft.publish()
    finally:
        os.umask(before)
    assert list(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / "x"]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o775


def test_the_next_writer_removes_the_draft_of_a_killed_one_and_no_other(tmp_path: Path) -> None:
    draft = killed_writer(tmp_path / "a")
    with drafting(tmp_path / "b"):
        assert draft.exists(), "it is a draft of another folder"
    with drafting(tmp_path / "a") as new:
        assert not draft.exists() and not list(new.path.iterdir())
    assert not list(tmp_path.iterdir()), "what is not published is removed"


def test_a_second_writer_is_refused_and_takes_nothing_from_the_first(tmp_path: Path) -> None:
    with drafting(tmp_path / "a") as draft:
        (draft.path / "x").touch()
        with pytest.raises(BlockingIOError), drafting(tmp_path / "a"):
            pass
        remove_ruins(tmp_path)
        assert (draft.path / "x").exists()


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    final = tmp_path / "a"
    final.mkdir()
    (final / "old").touch()
    with drafting(final) as draft:
        (draft.path / "new").touch()
        with pytest.raises(OSError, match="not empty") as caught:
            draft.publish()
        assert caught.value.filename == str(final) and (final / "old").exists()
        (final / "old").unlink()
        draft.publish()
    assert list(tmp_path.rglob("*")) == [final, final / "new"]


def test_a_draft_that_others_rename_is_published_all_the_same(tmp_path: Path) -> None:
    """They may rename entries of a folder that they can write to, and put a link to a folder of ours there."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "a").write_text("precious")
    with drafting(tmp_path / "a") as draft:
        draft.place.rename(tmp_path / "elsewhere")
        draft.place.symlink_to(mine)
        (draft.path / "a").write_text("new")
        draft.publish()
    assert (tmp_path / "a" / "a").read_text() == "new" and (mine / "a").read_text() == "precious"


def test_only_what_is_marked_as_a_draft_is_removed(tmp_path: Path) -> None:
    """Another user may rename any folder here to the name of a draft, or put a link in its place."""
    mine, number = tmp_path / "mine", "0123456789abcdef"
    for folder in (mine, tmp_path / f".writing-a.{number}", tmp_path / f".removing-a.{number}"):
        folder.mkdir(0o700)
        (folder / "precious").touch()
    (mine / MARK).touch(0o600)
    (tmp_path / f".writing-a.{number[::-1]}").symlink_to(mine)
    (tmp_path / ".writing-a").mkdir(0o700)
    (tmp_path / f".writing-b.{number}").touch()
    before = sorted(tmp_path.rglob("*"))
    remove_ruins(tmp_path, tmp_path / "none")
    with drafting(tmp_path / "a"):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_in_the_place_of_a_new_draft_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its creation and its opening another user can put a folder of ours there."""
    mine, mkdir = tmp_path / "mine", os.mkdir
    mine.mkdir(0o700)
    (mine / "a").write_text("precious")

    def replaced(name: str, mode: int, *, dir_fd: int) -> None:
        mkdir(name, mode, dir_fd=dir_fd)
        (tmp_path / name).rename(tmp_path / "theirs")
        mine.rename(tmp_path / name)

    with opened(tmp_path) as parent, monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", replaced)
        with pytest.raises(PermissionError, match="another user"), drafting(tmp_path / "a", parent):
            pass
    (put,) = tmp_path.glob(".writing-*")
    assert [path.name for path in put.iterdir()] == ["a"] and (put / "a").read_text() == "precious"


def test_processes_write_one_draft_together(tmp_path: Path) -> None:
    with opened(tmp_path) as parent:
        drafts = [Draft.shared(parent, "a", "0123456789abcdef") for _ in range(2)]
        for number, draft in enumerate(drafts):
            (draft.path / f"{number}").touch()
        drafts[0].publish()
        drafts[1].close()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0", "1", "a"]


def test_a_shared_draft_must_be_ours(tmp_path: Path) -> None:
    place = tmp_path / ".writing-a.0123456789abcdef"
    place.mkdir()
    (place / "precious").touch()
    for _ in range(2):  # without a mark, then with one in a folder that others may enter
        with opened(tmp_path) as parent, pytest.raises(OSError):
            Draft.shared(parent, "a", "0123456789abcdef")
        (place / MARK).touch(0o600)
    assert (place / "precious").exists()


def test_ruins_of_writers_and_removals_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted removal leaves no incomplete folder under the name that readers look for."""

    def interrupted(folder: Path) -> None:
        (folder / "x").unlink()
        raise KeyboardInterrupt

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").touch()
    killed_writer(tmp_path / "b")
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


def test_a_link_is_removed_in_place_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a").touch()
    (tmp_path / "step").symlink_to("mine")
    remove_folder(tmp_path / "step")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "mine"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of other users")
def test_links_of_this_user_are_followed_and_those_of_others_are_not(tmp_path: Path) -> None:
    """Users move `checkpoints` to another disk, and put a link in its place."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "checkpoints").symlink_to("disk")
    with opened(tmp_path / "checkpoints", follow_links=False) as handle:
        assert os.path.samestat(os.fstat(handle), (tmp_path / "disk").stat())
    os.lchown(tmp_path / "checkpoints", 40002, 40002)
    with pytest.raises(OSError, match="another user has made"), opened(tmp_path / "checkpoints", follow_links=False):
        pass
    with opened(tmp_path / "checkpoints"):
        pass


def test_no_part_of_a_file_that_is_opened_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_text("a")
    (tmp_path / "real" / "b").symlink_to("a")
    (tmp_path / "link").symlink_to("real")
    with opened(tmp_path) as folder:
        with opened_file(folder, "real/a") as path:
            assert path.read_text() == "a"
        for name in ("real/b", "link/a"):
            with pytest.raises(OSError), opened_file(folder, name):
                pass


def test_errors_name_paths_that_people_know(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, drafting(tmp_path / "a") as draft:
        (draft.path / "none").read_bytes()
    assert str(caught.value.filename).startswith(f"{tmp_path}/.writing-a.")
    assert str(caught.value.filename).endswith("/a/none")


def test_a_temporary_folder_is_removed_and_no_other_that_was_put_in_its_place(tmp_path: Path) -> None:
    with temporary(tmp_path, "a-") as made:
        (made / "b").mkdir()
        (made / "b" / "c").touch()
    with pytest.raises(KeyError), temporary(tmp_path, "a-"):
        raise KeyError
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError), temporary(tmp_path, "a-", keeps=(KeyError,)):
        raise KeyError
    (kept,) = tmp_path.iterdir()
    with temporary(tmp_path, "a-") as made:
        (made / "x").touch()
        made.rename(tmp_path / "moved")
        made.mkdir()
        (made / "precious").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([kept.name, made.name, "moved", "precious"])
