from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from engine.config.load import load
from engine.errors import ConfigError, ExitCode, MemoryFitError
from engine.hardware import profile as profiling
from engine.hardware.fit import calibrate, points
from engine.hardware.profile import Profile, check_cluster, profile
from engine.launch.commands import RankCommand
from engine.launch.ranks import PreemptedError, RankError
from engine.run.folder import RunFolder
from tests.hardware.machines import config, measured


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def ranks_that(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[RankCommand]:
    """Replace the ranks: they end with an error or with the measurements of the known machine. Returns the commands."""
    run: list[RankCommand] = []

    def run_ranks(commands: list[RankCommand], folder: RunFolder, tick: object, say: object) -> None:
        run.extend(commands)
        if error is not None:
            raise error
        measured().write(folder.root / "measured.json")

    monkeypatch.setattr(profiling, "run_ranks", run_ranks)
    return run


def test_what_the_ranks_measured_is_fitted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_that(monkeypatch, None)
    said: list[str] = []
    found = profile(load([]), 0, said.append)
    assert found.calibration == calibrate(measured(), config())
    assert found.median_error < 1e-3
    assert said == ["measuring model=tiny with 2 layers on 2 CPU ranks"]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("ranks", "cores", "threads"), [(2, 16, "8"), (16, 16, "1"), (64, 16, "1")])
def test_ranks_have_as_many_threads_as_in_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, cores: int, threads: str
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    commands = ranks_that(monkeypatch, None)
    profile(load([f"cluster.ranks_per_node={ranks}"]), 0, print)
    assert [command.environment["OMP_NUM_THREADS"] for command in commands] == [threads] * 2
    assert [command.environment["RANK"] for command in commands] == ["0", "1"]


def test_interrupted_ranks_leave_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_that(monkeypatch, PreemptedError("stopped on request"))
    with pytest.raises(KeyboardInterrupt):
        profile(load([]), 0, print)
    assert list(folder.iterdir()) == []


def test_a_failed_rank_leaves_its_logs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_that(monkeypatch, RankError("rank 0 failed", ExitCode.BUG, RunFolder(folder), 0, None))
    with pytest.raises(RankError):
        profile(load([]), 0, print)
    assert len(list(folder.glob("*/logs"))) == 1


def test_what_does_not_fit_leaves_nothing(folder: Path) -> None:
    with pytest.raises(MemoryFitError):
        profile(load(["cluster.device_memory=1M"]), 0, print)
    assert list(folder.iterdir()) == []


def test_a_cluster_of_gpus_is_not_measured_without_one() -> None:
    ours = load(["cluster=h200x8"])
    with pytest.raises(ConfigError, match="this machine has no GPU") as caught:
        check_cluster(ours, 0)
    assert caught.value.problems[0].key == "cluster=h200x8"
    check_cluster(ours, 1)
    check_cluster(load([]), 0)


def test_errors_and_spread_of_a_profile() -> None:
    ours = measured()
    calibration = calibrate(ours, config())
    found = Profile(calibration, ours, config(), points(ours, calibration, config()))
    assert found.spread == 0
    assert abs(found.worst.error) == max(abs(point.error) for point in found.points)
