from __future__ import annotations

from pathlib import Path

import pytest

from engine.cluster.available_memory import available_bytes, total_bytes


def machine(
    root: Path, available: int, group: str | None = None, most: str = "max", used: int = 0
) -> tuple[Path, Path]:
    """Write a fake /proc and /sys/fs/cgroup, and return both."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable: {available} kB\n")
    if group is not None:
        (proc / "self" / "cgroup").write_text(f"0::/{group}\n")
        (cgroups / group).mkdir(parents=True)
        (cgroups / group / "memory.max").write_text(most)
        (cgroups / group / "memory.current").write_text(str(used))
        (cgroups / group / "memory.stat").write_text("anon 7\ninactive_file 60\nactive_file 40\n")
    return proc, cgroups


def test_available_memory_of_a_machine_without_limits(tmp_path: Path) -> None:
    assert available_bytes(*machine(tmp_path, available=50)) == 50 * 1024


def test_a_container_limit_counts_and_its_caches_are_available(tmp_path: Path) -> None:
    assert available_bytes(*machine(tmp_path, 50, "job/step", most="5000", used=2000)) == 3100


def test_the_limit_of_a_parent_group_counts(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, 50, "job/step")
    for name, text in {"max": "1000", "current": "2000", "stat": ""}.items():
        (cgroups / "job" / f"memory.{name}").write_text(text)
    assert available_bytes(proc, cgroups) == 0


def test_max_means_no_limit(tmp_path: Path) -> None:
    assert available_bytes(*machine(tmp_path, 50, "job/step", most="max\n")) == 50 * 1024


def test_total_memory_is_that_of_the_machine_or_the_limit_of_its_container(tmp_path: Path) -> None:
    assert total_bytes(*machine(tmp_path / "free", available=50)) == 99 * 1024
    proc, cgroups = machine(tmp_path / "limited", 50, "job/step", most="max\n")
    assert total_bytes(proc, cgroups) == 99 * 1024
    (cgroups / "job" / "memory.max").write_text("5000\n")
    assert total_bytes(proc, cgroups) == 5000


def test_a_job_that_is_throttled_before_it_is_killed(tmp_path: Path) -> None:
    proc, cgroups = machine(tmp_path, 50, "job/step", most="9000", used=2000)
    (cgroups / "job" / "step" / "memory.high").write_text("5000\n")
    assert (available_bytes(proc, cgroups), total_bytes(proc, cgroups)) == (3100, 5000)
    (cgroups / "job" / "step" / "memory.high").write_text("max\n")
    assert (available_bytes(proc, cgroups), total_bytes(proc, cgroups)) == (7100, 9000)


@pytest.mark.parametrize("inside", ["", "docker/abc"])
def test_limits_of_version_1_count(tmp_path: Path, inside: str) -> None:
    """In a container its own group is at the top, though /proc names the folder that it has outside."""
    proc, cgroups = machine(tmp_path, 50)
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/docker/abc\n")
    group = cgroups / "memory" / inside
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("5000\n")
    (group / "memory.usage_in_bytes").write_text("2000\n")
    caches = "inactive_file 1\nactive_file 1\ntotal_inactive_file 60\ntotal_active_file 40\n"
    (group / "memory.stat").write_text(f"cache 7\n{caches}")
    assert (available_bytes(proc, cgroups), total_bytes(proc, cgroups)) == (3100, 5000)
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # no limit
    assert (available_bytes(proc, cgroups), total_bytes(proc, cgroups)) == (50 * 1024, 99 * 1024)


def test_a_system_that_reports_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None and total_bytes(tmp_path, tmp_path) is None


def test_this_machine() -> None:
    assert (available_bytes() or 1) > 0
