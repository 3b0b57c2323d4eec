"""GPUs that are missing are reported before any rank starts; here a stand-in counts them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from engine.config.load import load
from engine.errors import PreflightError
from engine.job import Job
from engine.launch.checks import launchable
from engine.launch.checks.launchable import gpu_problem
from engine.launch.run import train
from tests.refusals import refused


def h200(*overrides: str) -> Job:
    return Job(load(["recipe=h200-1b-8k", *overrides]))


@pytest.fixture(autouse=True)
def visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(launchable, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(launchable, "pytorch_without_cuda", lambda: None)


def test_a_machine_without_a_gpu_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, 0)
    out = tmp_path / "run"
    job = h200("cluster.ranks_per_node=8", f"run.out={out}")
    with refused(PreflightError, "cluster=h200x8") as problems:
        train(job.config)
    assert not out.exists() and "CUDA_VISIBLE_DEVICES" not in problems[0].message
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = gpu_problem(job)
    assert hidden is not None and "CUDA_VISIBLE_DEVICES=''" in hidden.message, "it may be why"


def test_a_dry_run_lists_missing_gpus_with_what_else_a_launch_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, 0)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.py").write_text("print()\n" * 400)
    job = h200(f"data.path={tmp_path / 'data'}", f"run.out={tmp_path / 'run'}")
    shown = train(job.config, dry_run=True, say=lambda line: None)["dry_run"]
    assert [problem["key"] for problem in shown["refused"]] == ["cluster=h200x8"]


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 2)
    problem = gpu_problem(h200("cluster.ranks_per_node=8"))
    assert problem is not None
    assert (problem.key, problem.hint) == ("cluster.ranks_per_node=8", "set cluster.ranks_per_node=2")
    assert "8 ranks" in problem.message and " 2 " in problem.message and socket.gethostname() in problem.message
    problem = gpu_problem(h200("cluster.ranks_per_node=8", "parallel.tp=4"))
    assert problem is not None
    hint = "set cluster.ranks_per_node=2 parallel.tp=2 parallel.pp=1"
    assert problem.hint == hint, "a node of two GPUs does not hold the mesh either"
    assert gpu_problem(h200("cluster.ranks_per_node=2")) is None
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=4\n")
    problem = gpu_problem(h200(f"cluster.hostfile={hosts}"))
    assert problem is not None
    assert (problem.key, problem.hint) == ("cluster.hostfile", f"set slots=2 for this machine in {hosts}")


def test_ranks_share_a_gpu_in_tests_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one GPU are refused, and with the test mode every model but a small one on a single host."""
    machine(monkeypatch, 1)
    tiny = h200("model=tiny", "context=64", "capacity=64", "cluster.ranks_per_node=4")
    refused_ = gpu_problem(tiny)
    assert refused_ is not None and refused_.key == "cluster.ranks_per_node=4"
    assert socket.gethostname() in refused_.message
    monkeypatch.setenv("BYTESCALE_ONE_GPU", "1")
    assert gpu_problem(tiny) is None
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=4\nbeta slots=4\n")
    several = h200("model=tiny", "context=64", "capacity=64", f"cluster.hostfile={hosts}")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("alpha slots=4\nbeta slots=4\n")
    others = h200("model=tiny", "context=64", "capacity=64", f"cluster.hostfile={elsewhere}")
    for job in (h200("cluster.ranks_per_node=4"), several, others):
        problem = gpu_problem(job)
        assert problem is not None and problem.key == "BYTESCALE_ONE_GPU=1"
    machine(monkeypatch, 0)
    problem = gpu_problem(tiny)
    assert problem is not None and problem.key == "cluster=h200x8"
    monkeypatch.setenv("BYTESCALE_ONE_GPU", "0")
    machine(monkeypatch, 1)
    assert gpu_problem(tiny) == refused_


def test_other_hosts_and_clusters_of_cpus_need_no_gpu_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchable, "visible_gpus", lambda: pytest.fail("nothing here needs a GPU"))
    hosts = tmp_path / "hosts"
    hosts.write_text("alpha slots=8\nbeta slots=8\n")
    assert gpu_problem(h200(f"cluster.hostfile={hosts}")) is None
    assert gpu_problem(Job(load(["recipe=quickstart"]))) is None


def test_gpus_that_pytorch_cannot_use_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, 1)
    monkeypatch.setattr(launchable, "pytorch_without_cuda", lambda: "2.13.0+cpu")
    out = tmp_path / "run"
    job = h200("cluster.ranks_per_node=1", f"run.out={out}")
    with refused(PreflightError, "cluster=h200x8") as problems:
        train(job.config)
    assert not out.exists() and "PyTorch 2.13.0+cpu" in problems[0].message


def test_many_ranks_on_few_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchable, "cores", lambda: 2)
    lines = []
    for ranks in (4, 64):
        job = Job(load(["recipe=quickstart", f"cluster.ranks_per_node={ranks}"]))
        lines.append(launchable.shared_cores(job))
    assert lines == [None, "64 ranks share 2 cores of this machine and take turns; --nproc 2 is not slower"]
    assert launchable.shared_cores(h200("cluster.ranks_per_node=8")) is None
