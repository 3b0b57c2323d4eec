from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from engine.config.load import load
from engine.errors import ExitCode, MemoryFitError, PreflightError
from engine.hardware import profile as profiling
from engine.hardware.fit import calibrate, points, split_launch_bound
from engine.hardware.profile import Profile, check_cluster, profile
from engine.job import Job
from engine.launch.agents.commands import NodeCommand
from engine.launch.agents.ranks import PreemptedError, RankError
from engine.run.folder import RunFolder
from tests.hardware.machines import config, measured, network
from tests.refusals import refused


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def ranks_that(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> list[NodeCommand]:
    """Replace the ranks: they end with an error or with the measurements of the known machine. Returns the commands."""
    run: list[NodeCommand] = []

    def run_ranks(commands: list[NodeCommand], folder: RunFolder, tick: object, say: object) -> None:
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
    assert found.measured == measured() and found.launch_bound == ()
    assert found.median_error < 1e-3
    assert said == ["measuring model=tiny with 2 layers on 2 CPU ranks"]
    assert list(folder.iterdir()) == []


def test_on_gpus_launch_bound_micro_batches_are_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is that of the known machine, and no GPU is looked for."""
    ranks_that(monkeypatch, None)
    monkeypatch.setattr(profiling, "check_cluster", lambda config, gpus: None)
    monkeypatch.setattr(profiling, "measuring", lambda config, ranks, folder: gpu)
    monkeypatch.setattr(profiling, "write_folder", lambda config, folder: None)
    cluster = config().cluster.model_copy(update={"name": "h200x8"})
    gpu = config().model_copy(update={"cluster": cluster})
    found = profile(gpu, 2, lambda text: None)
    used, launch_bound = split_launch_bound(measured())
    assert found.launch_bound == launch_bound != ()
    assert found.measured == used and len(found.points) == len(used.micro_batches)
    assert found.calibration == calibrate(used, gpu)
    reference = replace(measured(), kernel="reference")
    monkeypatch.setattr(profiling, "read", lambda path: reference)
    assert profile(gpu, 2, lambda text: None).launch_bound == ()


@pytest.mark.parametrize(("ranks", "cores", "threads"), [(2, 16, "8"), (16, 16, "1"), (64, 16, "1")])
def test_ranks_have_as_many_threads_as_in_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, cores: int, threads: str
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    commands = ranks_that(monkeypatch, None)
    profile(load([f"cluster.ranks_per_node={ranks}"]), 0, print)
    (command,) = commands
    assert command.work.environment["OMP_NUM_THREADS"] == threads
    assert command.ranks == [0, 1]


def test_a_hostfile_of_two_nodes_adds_their_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first two; the run folder is where hosts share it, and ranks of other hosts get the same program."""
    (tmp_path / "hosts").write_text("a slots=2\nb slots=3\nc slots=2\n")
    monkeypatch.chdir(tmp_path)
    run: list[NodeCommand] = []

    def run_ranks(commands: list[NodeCommand], folder: RunFolder, tick: object, say: object) -> None:
        run.extend(commands)
        assert folder.root.parent == tmp_path
        measured().write(folder.root / "measured.json")
        (folder.root / "network.json").write_text(json.dumps(asdict(network(2, 1))))

    monkeypatch.setattr(profiling, "run_ranks", run_ranks)
    said: list[str] = []
    found = profile(load(["cluster.hostfile=hosts"]), 0, said.append)
    assert found.measured.network == network(2, 1)
    assert found.calibration.network_bytes_per_s == pytest.approx(4e10)
    *network_nodes, machine = run
    assert [(node.host, node.ranks) for node in network_nodes] == [("a", [0, 1]), ("b", [2, 3, 4])]
    assert (machine.host, machine.ranks) == ("localhost", [0, 1])
    assert all(program[2:4] == ["engine.hardware", "machine"] for _, program in machine.work.ranks)
    for program in (program for node in network_nodes for _, program in node.work.ranks):
        assert program[1:4] == ["-m", "engine.hardware", "network"]
        assert program[-1] == "2", "ranks of the first node"
    assert said[0] == "measuring messages between a and b"
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


def test_interrupted_ranks_leave_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_that(monkeypatch, PreemptedError("stopped on request"))
    with pytest.raises(KeyboardInterrupt):
        profile(load([]), 0, print)
    assert list(folder.iterdir()) == []


def test_a_failed_rank_leaves_its_logs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_that(monkeypatch, RankError("failed", ExitCode.BUG, folder / "rank-0.log", "see there", 0, "localhost"))
    with pytest.raises(RankError):
        profile(load([]), 0, print)
    assert len(list(folder.glob("*/logs"))) == 1


def test_what_does_not_fit_leaves_nothing(folder: Path) -> None:
    with pytest.raises(MemoryFitError):
        profile(load(["cluster.device_memory=1M"]), 0, print)
    assert list(folder.iterdir()) == []


def test_a_cluster_of_gpus_is_not_measured_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = load(["cluster=h200x8"])
    with refused(PreflightError, "cluster=h200x8") as none:
        check_cluster(Job(ours), 0)
    monkeypatch.setattr("engine.launch.checks.launchable.pytorch_without_cuda", lambda: None)
    check_cluster(Job(ours), 1)
    monkeypatch.setattr("engine.launch.checks.launchable.pytorch_without_cuda", lambda: "2.13.0+cpu")
    with refused(PreflightError, "cluster=h200x8") as without:
        check_cluster(Job(ours), 1)
    assert none[0].message != without[0].message
    check_cluster(Job(load([])), 0)


def test_slots_without_a_gpu_are_found_before_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.launch.checks.launchable.visible_gpus", lambda: 1)
    (tmp_path / "hosts").write_text("localhost slots=2\nb slots=2\n")
    with refused(PreflightError, "cluster.hostfile"):
        check_cluster(Job(load(["cluster=h200x8", f"cluster.hostfile={tmp_path / 'hosts'}"])), 1)


def test_errors_and_spread_of_a_profile() -> None:
    ours = measured()
    calibration = calibrate(ours, config())
    found = Profile(calibration, ours, config(), points(ours, calibration, config()), launch_bound=())
    assert found.spread == 0
    assert abs(found.worst.error) == max(abs(point.error) for point in found.points)
