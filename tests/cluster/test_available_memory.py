from __future__ import annotations

from pathlib import Path

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


def test_a_system_that_reports_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path, tmp_path) is None and total_bytes(tmp_path, tmp_path) is None


def test_this_machine() -> None:
    assert (available_bytes() or 1) > 0
