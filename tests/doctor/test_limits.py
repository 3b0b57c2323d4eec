from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.cluster import numa
from engine.cluster.gpus import Gpu
from engine.doctor import limits
from engine.launch.checks import ready
from engine.launch.checks.ready import Need
from tests.cluster.sysfs import fake

SMALL = Need(ranks=2, world=2, nodes=1, gpus=False)
LARGE = Need(ranks=8, world=1024, nodes=128, gpus=True)


def limited(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int = resource.RLIM_INFINITY) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(ready, "own_groups", lambda proc, cgroups, controller: [])


@pytest.mark.parametrize(
    ("soft", "need", "state"),
    [
        (1024, SMALL, "ok"),
        (511, SMALL, "failed"),
        (895, LARGE, "failed"),
        (1024, LARGE, "ok"),
        (1024, LARGE._replace(gpus=False), "failed"),
        (65536, LARGE, "ok"),
        (resource.RLIM_INFINITY, LARGE, "ok"),
    ],
)
def test_open_files_grow_with_the_world(soft: int, need: Need, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, soft)
    assert limits.open_files(need).state == state


def test_a_limit_that_only_an_administrator_can_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 256, 4096)
    assert str(limits.open_files(SMALL).hint).startswith("`ulimit -n ")
    limited(monkeypatch, 256, 256)
    assert "administrator" in str(limits.open_files(SMALL).hint)


def test_locked_memory_matters_to_networks_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 8 << 20)
    assert limits.locked_memory(LARGE).state == "warning"
    assert limits.locked_memory(LARGE).value == "8.0 MiB"
    assert limits.locked_memory(LARGE._replace(nodes=1)).state == limits.locked_memory(SMALL).state == "ok"
    limited(monkeypatch, resource.RLIM_INFINITY)
    assert limits.locked_memory(LARGE).state == "ok"


def test_processes_of_a_user_and_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 300)
    assert limits.processes(SMALL).state == "failed"
    limited(monkeypatch, resource.RLIM_INFINITY)
    assert limits.processes(SMALL).state == "ok"
    (tmp_path / "pids.max").write_text("1000\n")
    (tmp_path / "pids.current").write_text("900\n")
    monkeypatch.setattr(ready, "own_groups", lambda proc, cgroups, controller: [tmp_path, tmp_path / "root"])
    found = limits.processes(SMALL)
    assert (found.state, found.value) == ("failed", "100 threads")
    (tmp_path / "pids.max").write_text("max\n")
    assert limits.processes(SMALL).state == "ok"


def test_the_limit_of_a_user_is_none_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, 300)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert limits.processes(SMALL).state == "ok"


@pytest.mark.parametrize(("free", "state"), [(2 << 30, "ok"), ((2 << 30) - 1, "failed"), (None, "warning")])
def test_memory(free: int | None, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_bytes", lambda: free)
    assert limits.memory(SMALL).state == state


@pytest.mark.parametrize(
    ("free", "need", "state"),
    [
        (64 << 20, SMALL, "ok"),
        (1 << 20, SMALL, "failed"),
        (64 << 20, LARGE, "failed"),
        (1 << 30, LARGE, "ok"),
        (64 << 20, LARGE._replace(ranks=1), "ok"),
    ],
)
def test_shared_memory(free: int, need: Need, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB, the default of containers, are too few for NCCL between GPUs of a machine."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    assert limits.shared_memory(need).state == state


def test_objects_of_ray_need_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 29))
    assert limits.shared_memory(SMALL).state == "ok"
    assert limits.shared_memory(SMALL._replace(ray=1 << 29)).state == "ok"
    found = limits.shared_memory(SMALL._replace(ray=(1 << 29) + 1))
    assert found.state == "failed" and "data.ray.memory" in found.message


def test_no_shared_memory_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SHARED", tmp_path / "shm")
    assert limits.shared_memory(SMALL).value == "missing"


A, B = "0000:1b:00.0", "0000:9a:00.0"


@pytest.mark.parametrize(
    ("places", "allowed", "state", "value"),
    [
        ({A: "0", B: "1"}, set(range(16)), "ok", "2 NUMA nodes"),
        ({A: "0", B: "1"}, set(range(8)), "ok", "2 NUMA nodes"),  # a job on one socket: nothing can be bound
        ({A: "0", B: "1"}, set(range(9)), "warning", "2 NUMA nodes"),  # one processor near the second GPU
        ({A: "0", B: "-1"}, set(range(16)), "warning", "1 NUMA node"),
    ],
)
def test_where_ranks_on_gpus_would_run(
    places: dict[str, str],
    allowed: set[int],
    state: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numa, "SYS", fake(tmp_path, ["0-7", "8-15"], places))
    monkeypatch.setattr(limits, "gpus", lambda: [Gpu("card", place) for place in places])
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: allowed)
    found = limits.processors(LARGE)
    assert (found.state, found.value) == (state, value)
    assert state == "ok" or (found.hint and "GPUs 1" in found.message)
    assert limits.processors(SMALL).state == "skipped"
