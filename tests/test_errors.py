"""Errors keep all of their fields when they are pickled: the planning process sends them to its parent."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

from engine.errors import BytescaleError, ConfigError, DataError, PlanError, Problem, storage_error


@pytest.mark.parametrize(
    "error",
    [
        PlanError(4, "a cycle"),
        DataError("gone", key="a.txt:3", hint="bring it back"),
        ConfigError("x", key="run.steps"),
    ],
)
def test_errors_survive_pickling(error: BytescaleError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert again.problems == error.problems
    assert vars(again) == vars(error)


def test_a_config_error_carries_all_mistakes() -> None:
    mistakes = [Problem("one", "a"), Problem("two", "b")]
    error = ConfigError.of(mistakes)
    assert error.problems == tuple(mistakes)
    assert str(error) == "one"


NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error. Last error:\nError while creating shared memory "
    "segment /dev/shm/nccl-F8Kd2e (size 9637888), error: No space left on device (28)"
)


@pytest.mark.parametrize(
    ("error", "free"),
    [
        (RuntimeError(NCCL), 1 << 30),
        (RuntimeError(NCCL.partition(", error")[0]), 9 << 20),
        (OSError(errno.ENOSPC, "No space"), 0),
    ],
)
def test_full_shared_memory_is_named(error: Exception, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers have 64 MiB of it, and the errors of libraries do not say so, or in the last of many lines."""
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free, f_frsize=1))
    found = storage_error(error)
    assert found is not None and found.code == 74
    assert found.problems[0].key == "/dev/shm" and "--shm-size" in str(found.problems[0].hint)


def test_a_full_disk_is_not_taken_for_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=0, f_frsize=1))
    found = storage_error(OSError(errno.ENOSPC, "No space", "/data/a"))
    assert found is not None and found.problems[0].key == "/data/a"
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1 << 30, f_frsize=1))
    found = storage_error(OSError(errno.ENOSPC, "No space"))
    assert found is not None and found.problems[0].key is None
    assert storage_error(RuntimeError(NCCL.partition(", error")[0])) is None, "there is another reason"


def test_a_semaphore_that_finds_no_shared_memory_is_explained() -> None:
    """In a mount namespace with /dev/shm of one page, which is full."""
    fails = (
        "from multiprocessing import get_context\nfrom engine.errors import storage_error\n"
        "try:\n    get_context('spawn').Lock()\n"
        "except OSError as error:\n    print(storage_error(error).problems[0].key)"
    )
    fill = "mount -t tmpfs -o size=4k none /dev/shm && { head -c 9999 /dev/zero > /dev/shm/a 2> /dev/null || true; }"
    command = ["unshare", "--mount", "bash", "-c", f'{fill} && "$0" -c "$1"', sys.executable, fails]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"not permitted: {done.stderr}")
    assert done.stdout == "/dev/shm\n", done.stderr
