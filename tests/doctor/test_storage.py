from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.config.load import load
from engine.config.schema import Config
from engine.doctor import storage
from engine.models.build import build_model
from engine.run import checkpoints, saved
from tests.permissions import locked_out


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load([f"run.out={tmp_path}/runs/new"])


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """A check creates no run folder, and removes its files."""
    before = sorted(tmp_path.rglob("*"))
    yield
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "mine") == before


def test_a_good_folder(config: Config, tmp_path: Path) -> None:
    assert storage.run_folder(config).state == "ok"
    assert storage.data_cache(tmp_path / "cache").state == "ok"
    assert storage.checkpoint(config).state == "ok"


def test_the_space_is_that_of_the_checkpoints(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """`quickstart` has AdamW in fp32: four values of 4 bytes for each parameter."""
    one = storage.checkpoint_bytes(config)
    assert one == 16 * sum(weights_of(config))
    kept = 1 + config.run.keep_checkpoints
    for free, state in ((one - 1, "failed"), (one, "warning"), (kept * one - 1, "warning"), (kept * one, "ok")):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert storage.run_folder(config).state == state


def weights_of(config: Config) -> list[int]:
    with torch.device("meta"):
        return [parameter.numel() for parameter in build_model(config).parameters()]


def test_a_folder_that_cannot_be_written(config: Config, tmp_path: Path) -> None:
    with locked_out(tmp_path, 0o500):
        found = storage.run_folder(config)
    assert found.state == "failed" and "cannot be written and synced: Permission denied" in found.message
    assert found.hint is not None and "run.out=DIR" in found.hint


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    found = storage.data_cache(tmp_path / "mine")
    assert found.state == "failed" and "Not a directory" in found.message


def test_storage_that_fails_to_sync(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    found = storage.run_folder(config)
    assert found.state == "failed" and "Input/output error" in found.message


def test_slow_storage_is_a_warning(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 30))
    monkeypatch.setattr(storage.time, "monotonic", lambda: next(now))
    found = storage.run_folder(config)
    assert found.state == "warning" and "is slow: 1.0 MiB written, synced and renamed in 15 s" in found.message


def test_locks_without_effect(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of some network file systems."""
    monkeypatch.setattr("fcntl.flock", lambda file, how: None)
    found = storage.run_folder(config)
    assert found.state == "failed" and "locks do not exclude other processes" in found.message


def test_damage_that_is_not_noticed(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "check_hashes", lambda folder: None)
    found = storage.checkpoint(config)
    assert found.state == "failed" and "a flipped bit in a checkpoint was not detected" in found.message


def test_a_damaged_checkpoint_that_is_chosen(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "read", lambda folder: None)
    found = storage.checkpoint(config)
    assert found.state == "failed" and "was not chosen" in found.message
