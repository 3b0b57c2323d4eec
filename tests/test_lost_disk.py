"""A run whose disk is full or lost goes on exactly: later losses equal those of the uninterrupted run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.run.checkpoints import newest_first, read
from engine.run.saved import check_all, listed
from tests.faults import command, documents, ledger, losses, train_unharmed

pytestmark = pytest.mark.world

STEPS = 14


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return documents(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """An uninterrupted run. Its steps are all in the warm-up, whose learning rates do not depend on `run.steps`."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train_unharmed(run, data, STEPS)
    return run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_full_disk_is_named_and_the_same_command_goes_on_when_there_is_space(
    tmp_path: Path, data: Path, whole: Path, small_disk: Path
) -> None:
    """A checkpoint fills the disk. Its files are removed, or no rank could report the cause; the next start goes on."""
    run, filler = small_disk / "run", small_disk / "filler"
    more = [f"data.cache={tmp_path / 'cache'}", "run.checkpoint_every=2"]
    train_unharmed(run, data, 4, *more)
    size = sum(path.stat().st_size for path in newest_first(run / "checkpoints")[0].glob("zero/*"))
    usage = os.statvfs(small_disk)
    with filler.open("wb") as file:
        file.write(bytes(usage.f_bavail * usage.f_frsize - size // 2))
    full = subprocess.run(command(run, data, STEPS, *more), capture_output=True, text=True)
    assert full.returncode == 74, full.stderr
    said = " ".join(full.stderr.split())
    # Usually a file of the checkpoint; steps go on while it is written, so their metrics or ledger may come first.
    assert re.search(rf"failed:.*{re.escape(str(run))}/", "".join(full.stderr.split())), full.stderr
    assert "resuming from" in said and read(newest_first(run / "checkpoints")[0]).step == 4
    filler.unlink()
    train_unharmed(run, data, STEPS, *more)
    assert losses(run) == losses(whole) and ledger(run) == ledger(whole)


def test_a_run_goes_on_from_its_copies_when_its_folder_is_lost(tmp_path: Path, data: Path, whole: Path) -> None:
    """On another machine, or after a disk was lost: the same command, and the same losses."""
    run, copies = tmp_path / "run", f"file://{tmp_path}/copies"
    train_unharmed(run, data, 6, f"run.remote={copies}")
    assert [one["step"] for one in listed(copies)] == [6, 3]
    assert [one["damaged"] for one in check_all(copies)] == [None, None]
    shutil.rmtree(run)
    said = "\n".join(train_unharmed(run, data, 10, f"run.remote={copies}"))
    assert "resuming from" in said and f"copying {copies}/step-00000006" in said
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = losses(whole)
    assert [(line["step"], line["loss"]) for line in lines] == [(step, expected[step][0]) for step in range(7, 11)]
    assert [one["step"] for one in listed(copies)] == [10, 9, 6, 3]
    other = tmp_path / "other"
    train_unharmed(other, data, 7, resume=f"{copies}/step-00000006")
    (line,) = (json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines())
    assert line["step"] == 7 and read(newest_first(other / "checkpoints")[0]).step == 7
