"""Which checkpoints a run has, and from which one it resumes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.errors import CheckpointError, RunFolderError
from engine.files import locked
from engine.run import checkpoints as checkpoint
from engine.run.checkpoints import Retention, UnknownFormatError, newest_first
from engine.run.remote import Remote, fetch
from engine.run.saved import check_all, choose, listed, thin_out, verified
from tests.permissions import locked_out
from tests.refusals import refused
from tests.run.damage import flip, mistype, remove, renumber, save, scramble, truncate, unmanifest


def test_a_list_includes_damaged_checkpoints_and_hashes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One damaged checkpoint must not hide the others; truncated files are found without reading terabytes."""
    damages = [truncate, remove, unmanifest, scramble, mistype, lambda folder: None]
    for step, damage in enumerate(damages, start=1):
        damage(save(tmp_path / "checkpoints", step))
    monkeypatch.setattr(checkpoint, "_hash", lambda path: pytest.fail("a list that hashes takes minutes"))
    found = listed(tmp_path)
    assert [one["step"] for one in found] == [6, 5, 4, 3, 2, 1]
    assert [one["damaged"] for one in found] == [
        None,
        *["manifest.json is unreadable"] * 2,
        "manifest.json is missing",
        "zero/b.pt is missing",
        "zero/b.pt has 0 bytes instead of 10",
    ]
    assert [one["ranks"] for one in found] == [1, None, None, None, 1, 1]


def test_a_checkpoint_that_may_not_be_read_does_not_hide_the_others_of_a_list(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "checkpoints", step)
    with locked_out(tmp_path / "checkpoints/step-00000002/manifest.json"):
        found = listed(tmp_path)
    assert [(one["step"], one["damaged"]) for one in found] == [(2, "manifest.json may not be read"), (1, None)]


def test_all_checkpoints_of_a_run_or_one_are_compared_with_their_hashes(tmp_path: Path) -> None:
    folders = [save(tmp_path / "checkpoints", step) for step in (3, 2, 1)]
    for folder in folders[:2]:
        flip(folder)
    reason = "zero/a.pt does not match its hash"
    rows = [{"path": str(folder), "damaged": reason} for folder in folders[:2]]
    assert check_all(folders[0]) == rows[:1]
    assert check_all(tmp_path) == [*rows, {"path": str(folders[2]), "damaged": None}]


def test_thinning_out_keeps_the_newest_intact_ones_and_the_damaged_ones(tmp_path: Path) -> None:
    """Counting a damaged checkpoint as the newest would remove the last one that a run can resume from."""
    folders = [save(tmp_path / "checkpoints", step) for step in range(6, 0, -1)]
    flip(folders[0])
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "validation_loss": 1.0}\n{"step": 3, "validation_loss": 2.0}\n'
    )
    said, keep = list[str](), Retention(1, every=4, best=1)
    assert thin_out(tmp_path, keep, True, said.append) == [folders[3], folders[5]]
    assert newest_first(tmp_path / "checkpoints") == folders, "a dry run removes nothing"
    assert said == [
        "warning: step-00000006 is damaged (zero/a.pt does not match its hash); it is kept, but not counted"
    ]
    with locked(tmp_path / ".lock"), pytest.raises(RunFolderError, match="a run is using this folder"):
        thin_out(tmp_path, keep, False, print)
    assert thin_out(tmp_path, keep, False, print) == [folders[3], folders[5]]
    assert newest_first(tmp_path / "checkpoints") == [*folders[:3], folders[4]]


def test_nothing_is_removed_from_a_run_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path / "checkpoints", step)
    for place in (tmp_path, tmp_path / "checkpoints"):  # the second time the lock is taken
        with locked_out(place, 0o500), pytest.raises(RunFolderError, match=r"^is not writable") as caught:
            thin_out(tmp_path, Retention(1), False, print)
        assert caught.value.problems[0].key == str(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with (
        locked_out(tmp_path / ".lock", 0o400),
        pytest.raises(RunFolderError, match=r"^belongs to another user and is not"),
    ):
        thin_out(tmp_path, Retention(1), False, print)
    assert len(newest_first(tmp_path / "checkpoints")) == 2
    assert thin_out(tmp_path, Retention(1), False, print) == [tmp_path / "checkpoints/step-00000001"]


def test_the_hint_for_a_damaged_run_or_checkpoint_can_be_followed(tmp_path: Path) -> None:
    checkpoints, said = tmp_path / "checkpoints", list[str]()
    flip(save(checkpoints, 1))
    for source in (tmp_path, checkpoints / "step-00000001"):
        with pytest.raises(CheckpointError, match=r"zero/a\.pt does not match its hash") as caught:
            verified(source, said.append)
        hint = "`train --resume never` starts again from step 1 and keeps the old run in a folder next to it"
        assert caught.value.problems[0].hint == hint
    assert said == []
    save(checkpoints, 2)
    with pytest.raises(CheckpointError) as caught:
        verified(checkpoints / "step-00000001", said.append)
    assert caught.value.problems[0].hint == "choose another checkpoint, such as step-00000002"
    flip(save(checkpoints, 3))
    assert verified(tmp_path, said.append).name == "step-00000002"
    assert len(said) == 1 and "step-00000003" in said[0]


def test_without_hashes_manifests_and_sizes_are_checked(tmp_path: Path) -> None:
    """The ranks compare the hashes."""
    checkpoints, said = tmp_path / "checkpoints", list[str]()
    folders = [save(checkpoints, step) for step in (1, 2, 3)]
    scramble(folders[2])
    flip(folders[1])
    assert choose(checkpoints, said.append, hashes=False) == folders[1]
    assert verified(tmp_path, said.append, hashes=False) == verified(folders[1], print, hashes=False) == folders[1]
    truncate(folders[1])
    assert choose(checkpoints, said.append, hashes=False) == folders[0]


def test_only_damaged_checkpoints_are_an_error_and_no_checkpoint_is_not(tmp_path: Path) -> None:
    assert choose(tmp_path, print) is None
    flip(save(tmp_path, 1))
    with refused(CheckpointError, tmp_path) as problems:
        choose(tmp_path, lambda line: None)
    assert "00000001" in problems[0].message
    assert (tmp_path / "step-00000001").exists()


@pytest.mark.parametrize("number", [99, 0, -1, "two", None])
def test_an_older_checkpoint_does_not_take_the_place_of_one_in_a_newer_format(number: object, tmp_path: Path) -> None:
    """It is not damaged: the run would go back and set aside what a newer version has trained."""
    checkpoints, said = tmp_path / "checkpoints", list[str]()
    folders = [save(checkpoints, step) for step in (1, 2)]
    renumber(folders[1], number)
    for look in (
        *(lambda hashes=hashes: choose(checkpoints, said.append, hashes) for hashes in (True, False)),
        *(lambda source=source: verified(source, said.append) for source in (tmp_path, folders[1])),
        lambda: check_all(tmp_path),
        lambda: thin_out(tmp_path, Retention(1), False, said.append),
        lambda: Remote(f"file://{checkpoints}", "run.remote").checked(),
        lambda: fetch(Remote(f"file://{checkpoints}", "run.remote"), tmp_path / "other", print, said.append),
    ):
        with pytest.raises(UnknownFormatError) as caught:
            look()
        (problem,) = caught.value.problems
        assert str(problem.key).endswith(str(folders[1])) and str(number) in problem.message
        assert "ByteScale" in str(problem.hint) or number != 99
    assert said == [] and verified(folders[0], said.append) == folders[0]
    newest, older = listed(tmp_path)
    assert str(number) in newest["damaged"] and older["damaged"] is None


@pytest.mark.parametrize("mode", [0, 0o300, 0o600])
def test_a_folder_that_cannot_be_listed_is_not_one_without_checkpoints(tmp_path: Path, mode: int) -> None:
    """Taken for empty, it would start the run over and cut its metrics."""
    checkpoints = tmp_path / "checkpoints"
    save(checkpoints, 1)
    with locked_out(checkpoints, mode):
        for look in (lambda: choose(checkpoints, print), lambda: listed(tmp_path), lambda: verified(tmp_path, print)):
            with pytest.raises(PermissionError) as caught:
                look()
            assert str(caught.value.filename).startswith(str(checkpoints))


@pytest.mark.parametrize("name", ["", "manifest.json", "zero/a.pt", "zero"])
def test_a_checkpoint_that_may_not_be_read_is_not_damaged(tmp_path: Path, name: str) -> None:
    """Taken for damaged, the run would go back to the one before it."""
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    with locked_out(newest / name), pytest.raises(PermissionError):
        choose(tmp_path, print)
