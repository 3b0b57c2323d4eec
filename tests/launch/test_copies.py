"""Checkpoints are copied while a run goes on; a remote folder that fails never stops it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import PreflightError
from engine.launch import copies as module
from engine.launch.copies import copies
from engine.run.remote import Remote
from tests.run.damage import save


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.setattr(module, "_RETRY_S", (0.01, 0.02))
    monkeypatch.setattr(module, "_LAST_WAIT_S", 0.2)


def until(happened: Callable[[], object]) -> None:
    for _ in range(1000):
        if happened():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen")


def test_each_finished_checkpoint_is_copied_and_the_last_before_the_run_ends(tmp_path: Path) -> None:
    remote, said = Remote(f"file://{tmp_path}/remote"), list[str]()
    save(tmp_path, 1)
    with copies(tmp_path, remote, 1, said.append):
        until(lambda: remote.newest_first() == ["step-00000001"])
        save(tmp_path, 2)
        until(lambda: len(remote.newest_first()) == 2)
        shutil.rmtree(tmp_path / "step-00000001")
        save(tmp_path, 3)
    assert remote.newest_first() == [f"step-0000000{step}" for step in (3, 2, 1)]
    for name in remote.newest_first():
        remote.check(name)
    assert said == []


def test_a_failure_warns_once_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, said, tries = Remote(f"file://{tmp_path}/remote"), list[str](), list[Path]()
    upload = remote.upload

    def flaky(folder: Path) -> None:
        tries.append(folder)
        if len(tries) < 5:
            raise TimeoutError("no answer")
        upload(folder)

    monkeypatch.setattr(remote, "upload", flaky)
    with copies(tmp_path, remote, 0, said.append):
        save(tmp_path, 1)
        until(lambda: remote.newest_first())
        until(lambda: len(said) == 2)
    assert said[0].startswith("warning: checkpoints could not be copied to file://")
    assert said[0].endswith("TimeoutError: no answer; trying again")
    assert said[1].endswith("again") and len(said) == 2


def test_a_run_ends_although_its_copies_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, said = Remote(f"file://{tmp_path}/remote"), list[str]()

    def fails(folder: Path) -> None:
        raise PermissionError("no access")

    monkeypatch.setattr(remote, "upload", fails)
    save(tmp_path, 1)
    with copies(tmp_path, remote, 1, said.append):
        pass
    assert said[-1].endswith("PermissionError: no access")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_run_that_fails_does_not_wait_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Its scheduler may kill it soon, and it must report its own error."""
    remote, said = Remote(f"file://{tmp_path}/remote"), list[str]()
    monkeypatch.setattr(remote, "upload", lambda folder: time.sleep(30))
    save(tmp_path, 1)
    began = time.monotonic()
    with pytest.raises(error, match="its own"), copies(tmp_path, remote, 1, said.append):
        raise error("its own")
    assert time.monotonic() - began < 10
    assert said[-1].endswith("the next start copies them")


def test_a_checkpoint_that_was_removed_meanwhile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, said = Remote(f"file://{tmp_path}/remote"), list[str]()
    upload = remote.upload

    def slow(folder: Path) -> None:
        if folder.name == "step-00000001":
            shutil.rmtree(folder)
        upload(folder)

    monkeypatch.setattr(remote, "upload", slow)
    save(tmp_path, 1)
    with copies(tmp_path, remote, 1, said.append):
        until(lambda: said)
        save(tmp_path, 2)
    assert remote.newest_first() == ["step-00000002"]
    assert len(said) == 1 and "step-00000001 was removed before it was copied" in said[0]


def test_checkpoints_of_steps_to_come_are_not_used_any_more(tmp_path: Path) -> None:
    """Else another machine would resume from the steps that the user has gone back from."""
    remote, said = Remote(f"file://{tmp_path}/remote"), list[str]()
    for step in (1, 2, 3):
        remote.upload(save(tmp_path / "before", step))
    with copies(tmp_path, remote, 1, said.append):
        pass
    assert remote.newest_first() == ["step-00000001"]
    assert [line.partition(" is newer")[0].rpartition("/")[2] for line in said] == ["step-00000003", "step-00000002"]


def test_without_a_remote_folder_nothing_is_started(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="own"), copies(tmp_path, None, 0, print):
        raise PreflightError("its own")
