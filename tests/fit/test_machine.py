"""A run plans with the memory that its machine has; here stand-ins tell how much that is."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load, read_resolved
from engine.config.schema import Config
from engine.fit import check, machine
from engine.fit.check import fit_error
from engine.fit.machine import on_this_machine
from engine.hardware.prepare import measuring
from engine.job import Job
from engine.launch import supervise
from engine.launch.agents.commands import NodeCommand
from engine.launch.checks import launchable
from engine.launch.checks.launchable import gpu_problem
from engine.launch.run import train

GIB = 2**30


def has(monkeypatch: pytest.MonkeyPatch, host: int | None, gpu: int | None, gpus: int = 1) -> None:
    """Make this a machine with `host` bytes of memory and GPUs of `gpu` bytes."""
    monkeypatch.setattr(machine, "total_bytes", lambda: host)
    monkeypatch.setattr(machine, "least_gpu_memory", lambda: gpu)
    monkeypatch.setattr(launchable, "least_gpu_memory", lambda: gpu)
    monkeypatch.setattr(launchable, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(check, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(launchable, "pytorch_without_cuda", lambda: None)


def limited(*overrides: str) -> tuple[Config, list[str]]:
    job, lines = on_this_machine(Job(load([*overrides])))
    return job.config, lines


def test_one_h200_beside_128_gib_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe says 192 GiB a rank, as an eighth of a DGX H200."""
    has(monkeypatch, 128 * GIB, 150_000_000_000)
    config, lines = limited("recipe=h200-1b-8k", "cluster.ranks_per_node=1")
    assert (config.cluster.host_memory, config.cluster.device_memory) == (96 * GIB, 139 * GIB)
    assert lines == [
        "cluster.host_memory: planning with 96.0 GiB, each rank's share of three quarters of this machine's memory "
        "(1 rank), instead of 192.0 GiB"
    ]
    assert limited("recipe=h200-1b-8k", "cluster.ranks_per_node=1", "cluster.host_memory=80GiB")[1] == []


def test_the_smallest_gpu_limits_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, None, 79 * GIB)
    config, lines = limited("recipe=h200-1b-8k")
    assert (config.cluster.host_memory, config.cluster.device_memory) == (192 * GIB, 79 * GIB)
    assert lines == [
        "cluster.device_memory: planning with 79.0 GiB, the memory of this machine's smallest GPU, instead of 139.0 GiB"
    ]


def test_cpu_ranks_take_part_of_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own memory and that for offload are together what they may use: 4 and 2 GiB become 2 and 1."""
    has(monkeypatch, 8 * GIB, 79 * GIB)
    config, lines = limited("recipe=quickstart")
    assert (config.cluster.device_memory, config.cluster.host_memory) == (2 * GIB, GIB) and len(lines) == 2
    has(monkeypatch, 16 * GIB, None)
    assert limited("recipe=quickstart")[1] == [], "6 GiB for each of two ranks"


@pytest.mark.long
@pytest.mark.parametrize(("memory", "fewer"), [(24 * GIB, 22), (4 * GIB, 3), (GIB // 2, None)])
def test_too_many_ranks_for_this_machine_are_told_how_many_fit(
    memory: int, fewer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More devices are no way out: each would take a part of the same memory."""
    has(monkeypatch, memory, None)
    error = fit_error(Job(load(["recipe=quickstart", "cluster.ranks_per_node=64"])), {"cluster.nodes"})
    assert error is not None
    hint = str(error.problems[0].hint)
    assert hint.startswith(f"use cluster.ranks_per_node={fewer}" if fewer else "use a smaller model, or a machine")
    if fewer:
        assert fit_error(Job(load(["recipe=quickstart", f"cluster.ranks_per_node={fewer}"]))) is None
        assert fit_error(Job(load(["recipe=quickstart", f"cluster.ranks_per_node={fewer + 1}"]))) is not None


def test_other_hosts_are_not_judged_by_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, GIB, GIB)
    (tmp_path / "hosts").write_text("alpha slots=8\n")
    assert limited("recipe=h200-1b-8k", f"cluster.hostfile={tmp_path / 'hosts'}")[1] == []
    has(monkeypatch, None, None)
    assert limited("recipe=h200-1b-8k")[1] == [], "nothing is known"


def test_a_hostfile_that_promises_more_than_a_gpu_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(monkeypatch, None, 79 * GIB)
    (tmp_path / "hosts").write_text("localhost slots=1 memory=80GiB\n")
    config = load(["recipe=h200-1b-8k", f"cluster.hostfile={tmp_path / 'hosts'}"])
    problem = gpu_problem(Job(config))
    assert problem is not None and problem.key == "cluster.hostfile"
    assert problem.message == "says memory=80.0 GiB for this machine, but CUDA finds a GPU with 79.0 GiB"
    (tmp_path / "hosts").write_text("localhost slots=1 memory=79GiB\n")
    assert gpu_problem(Job(config)) is None


def small(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "data").mkdir(exist_ok=True)
    for number in range(12):
        (tmp_path / "data" / f"{number}.py").write_text(f"print({number})\n" * 40)
    sizes = ["context=256", "capacity=128", "batch_tokens=1K", "run.steps=1", "model.layers=1"]
    places = [f"data.path={tmp_path / 'data'}", f"run.out={tmp_path / 'run'}"]
    return load([*overrides, *sizes, *places])


def test_ranks_plan_with_it_and_another_machine_may_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolved config, which ranks read, has the memory of the machine; it is no reason to refuse the run later."""
    monkeypatch.setattr(supervise, "run_ranks", lambda *given: None)
    for memory in (8 * GIB, 12 * GIB):
        said: list[str] = []
        has(monkeypatch, memory, None, gpus=0)
        train(small(tmp_path, "recipe=quickstart"), say=said.append)
        assert read_resolved(tmp_path / "run" / "resolved.yaml").cluster.device_memory == memory // 4
        assert any(
            "part of each rank's share of three quarters of this machine's memory (2 ranks)" in line for line in said
        )


def test_a_machine_without_the_gpus_limits_no_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, GIB, None, gpus=0)
    said: list[str] = []
    train(small(tmp_path, "recipe=h200-1b-8k", "cluster.ranks_per_node=2"), dry_run=True, say=said.append)
    assert not [line for line in said if "planning with" in line]


def test_measuring_takes_what_is_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, None, 40 * GIB)
    assert measuring(load(["recipe=h200-1b-8k"]), 1, tmp_path).cluster.device_memory == 40 * GIB


def test_quickstart_takes_the_cpu_of_a_machine_with_one_gpu_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make quickstart` runs two ranks: if the machine decided, one would take cuda:1, which is not there."""
    has(monkeypatch, None, 139 * GIB, gpus=1)
    said, started = list[str](), list[NodeCommand]()
    monkeypatch.setattr(supervise, "run_ranks", lambda commands, *rest: started.extend(commands))
    train(small(tmp_path, "recipe=quickstart"), say=said.append)
    other = "docs/gpu.md; for example cluster=h200x8 cluster.ranks_per_node=1"
    assert f"cluster=local trains on CPUs: 1 GPU of this machine will not be used ({other})" in said
    (command,) = started
    assert command.ranks == [0, 1] and command.work.environment["CUDA_VISIBLE_DEVICES"] == ""
