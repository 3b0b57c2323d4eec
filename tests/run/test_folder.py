"""A run notices when its folder is moved or removed, and says where its checkpoints are."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import RunFolderError
from engine.run.folder import Held, RunFolder, held
from tests.refusals import refused
from tests.run.damage import save


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    save(made.checkpoints, 5)
    made.resolved.write_text("")
    return made


def move(folder: RunFolder) -> None:
    folder.root.rename(folder.root.with_name("moved"))


def replace(folder: RunFolder) -> None:
    """Another folder, which even has a config, is in its place."""
    move(folder)
    save(folder.checkpoints, 9)
    folder.resolved.write_text("")


CHANGES: dict[str, tuple[Callable[[RunFolder], None], str]] = {
    "moved": (move, "/moved "),
    "replaced": (replace, "/moved "),
    "removed": (lambda folder: shutil.rmtree(folder.root), ""),
    "emptied": (lambda folder: shutil.rmtree(folder.checkpoints), ""),
    "without its config": (lambda folder: folder.resolved.unlink(), ""),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_folder_that_is_gone_is_an_error_that_says_where_its_checkpoints_are(folder: RunFolder, name: str) -> None:
    change, place = CHANGES[name]
    hold = Held(folder)
    hold.check()
    change(folder)
    with refused(RunFolderError, folder.root) as problems:
        hold.check()
    (problem,) = problems
    assert place in problem.message
    newest = re.search(r"\S+/step-\d+", str(problem.hint))
    assert (newest is not None) == (name in ("moved", "replaced", "without its config"))
    assert newest is None or (Path(newest[0]).is_dir() and newest[0].endswith("step-00000005"))


def test_it_is_the_error_whatever_else_fails_and_no_error_hides_another(folder: RunFolder) -> None:
    with pytest.raises(FileNotFoundError), held(folder):
        (folder.root / "none").read_bytes()
    with held(folder):
        pass
    with pytest.raises(RunFolderError), held(folder):
        move(folder)
        folder.metrics.read_bytes()
    moved = RunFolder(folder.root.with_name("moved"))
    with pytest.raises(RunFolderError), held(moved):  # nothing failed, and the run cannot be resumed
        shutil.rmtree(moved.root)
