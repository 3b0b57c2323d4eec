"""What connects GPUs, with a folder in place of /sys. Two hosts with such faults: test_planted.py."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.cluster import gpus
from engine.doctor import host, interconnect
from engine.doctor.interconnect import Port, cards, compare, direct, fabric_manager, ports, selected
from engine.launch.checks.ready import Need
from tests.cluster.sysfs import with_cards

SEVERAL = Need(ranks=8, world=16, nodes=2, gpus=True)
ALONE, ON_CPUS = SEVERAL._replace(nodes=1, world=8), SEVERAL._replace(gpus=False)

UP, ROCE, DOWN = ("ACTIVE", "InfiniBand", 400.0), ("ACTIVE", "Ethernet", 100.0), ("DOWN", "InfiniBand", 10.0)
SLOW = ("ACTIVE", "InfiniBand", 100.0)
EIGHT = {f"mlx5_{number}:1": UP for number in range(8)}


def found(of: dict[str, tuple[str, str, float]]) -> list[Port]:
    return [Port(*_name(name), *facts) for name, facts in of.items()]


def _name(name: str) -> tuple[str, int]:
    card, _, number = name.partition(":")
    return card, int(number)


def test_ports_are_read_as_linux_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"mlx5_0:1": UP, "mlx5_0:2": DOWN, "mlx5_bond_0:1": ROCE}
    monkeypatch.setattr(interconnect, "SYS", with_cards(tmp_path, wanted))
    (tmp_path / "class/infiniband/mlx5_9/ports/1").mkdir(parents=True)  # a card that goes
    assert ports() == found(wanted)
    assert host.network_cards({"NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "INFO"}) == {
        "ports": found(wanted),
        "variables": {"NCCL_IB_HCA": "mlx5"},
    }


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        (None, "mlx5_1:1 mlx5_10:1 mlx5_10:2 rocep:1"),
        ("mlx5", "mlx5_1:1 mlx5_10:1 mlx5_10:2"),
        ("mlx5_1", "mlx5_1:1 mlx5_10:1 mlx5_10:2"),
        ("=mlx5_1", "mlx5_1:1"),
        ("=mlx5_10:2,rocep", "mlx5_10:2 rocep:1"),
        ("^mlx5_1", "rocep:1"),
        ("^=mlx5_1", "mlx5_10:1 mlx5_10:2 rocep:1"),
        ("mlx4", ""),
    ],
)
def test_nccl_ib_hca_selects_ports_as_in_nccl(variable: str | None, names: str) -> None:
    some = found(dict.fromkeys(("mlx5_1:1", "mlx5_10:1", "mlx5_10:2", "rocep:1"), UP))
    assert " ".join(map(str, selected(some, variable))) == names


MIXED = {**EIGHT, "mlx5_8:1": ROCE}


@pytest.mark.parametrize(
    ("of", "variables", "words", "way_out"),
    [
        (EIGHT, {}, None, None),
        ({}, {}, "has no InfiniBand or RoCE card", "mlx5_ib"),
        ({"mlx5_0:1": DOWN}, {}, "mlx5_0:1 DOWN", "ibstat"),
        ({**EIGHT, "mlx5_3:1": DOWN}, {}, "mlx5_3:1 DOWN", "subnet manager"),
        ({**EIGHT, "mlx5_8:1": ("DOWN", "Ethernet", 40.0)}, {}, None, None),  # a port without a cable
        (MIXED, {}, "(mlx5_8:1)", f"NCCL_IB_HCA='={','.join(EIGHT)}'`"),
        (MIXED, {"NCCL_IB_HCA": f"={','.join(EIGHT)}"}, None, None),
        (MIXED, {"NCCL_IB_HCA": "^=mlx5_8"}, None, None),
        ({**EIGHT, "mlx5_2:1": SLOW}, {}, "mlx5_2:1 are slower", "NCCL_IB_HCA='=mlx5_0:1,mlx5_1:1,"),
        (EIGHT, {"NCCL_IB_HCA": "mlx4"}, "NCCL_IB_HCA=mlx4 names no active port", "active are mlx5_0:1,"),
        (EIGHT, {"NCCL_IB_DISABLE": "1"}, "NCCL_IB_DISABLE is set", "unset NCCL_IB_DISABLE"),
        (EIGHT, {"NCCL_IB_DISABLE": "0"}, None, None),
        ({"rdmap0:1": ("ACTIVE", "Unspecified", 100.0)}, {}, None, None),  # EFA
    ],
)  # fmt: skip
def test_faults_of_the_cards_of_a_host(
    of: dict[str, tuple[str, str, float]], variables: dict[str, str], words: str | None, way_out: str | None
) -> None:
    """All hosts of this job have the same cards, so nothing fails."""
    both = compare({name: cards(found(of), variables) for name in ("gpu-a", "gpu-b")})
    for name, check in both.items():
        assert check.state == ("ok" if words is None else "warning") and name in check.message
        assert words is None or words in check.message
        assert way_out is None or way_out in str(check.hint)


@pytest.mark.parametrize(
    ("of", "state", "words"),
    [
        (EIGHT, "ok", "8 x InfiniBand 400 Gb/s"),
        ({}, "failed", "most hosts use InfiniBand"),  # NCCL would hang
        ({"mlx5_0:1": ROCE}, "failed", "most hosts use InfiniBand"),
        (dict.fromkeys(EIGHT, DOWN), "failed", "mlx5_0:1 DOWN"),
        (dict.fromkeys(list(EIGHT)[:7], UP), "warning", "has 7 x InfiniBand 400 Gb/s, most hosts have 8 x"),
        (dict.fromkeys(EIGHT, ("ACTIVE", "InfiniBand", 200.0)), "warning", "has 8 x InfiniBand 200 Gb/s"),
    ],
)
def test_a_host_that_differs_from_the_others(of: dict[str, tuple[str, str, float]], state: str, words: str) -> None:
    usual = cards(found(EIGHT), {})
    checks = compare({"gpu-a": usual, "gpu-b": cards(found(of), {}), "gpu-c": usual})
    assert {checks["gpu-a"].state, checks["gpu-c"].state} == {"ok"}
    assert checks["gpu-b"].state == state and words in checks["gpu-b"].message
    assert "gpu-b" in checks["gpu-b"].message and (state == "ok" or checks["gpu-b"].hint)
    assert checks["gpu-b"].value == cards(found(of), {}).kinds


def test_of_two_hosts_the_one_without_cards_fails() -> None:
    checks = compare({"gpu-a": cards([], {}), "gpu-b": cards(found(EIGHT), {})})
    assert (checks["gpu-a"].state, checks["gpu-b"].state) == ("failed", "ok")


class Driver:
    """Answers as libcuda does about eight GPUs."""

    def __init__(self, dma_buf: int = 0, error: int = 0) -> None:
        self.dma_buf, self.error = dma_buf, error

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.error

    def cuDeviceGetCount(self, count: ctypes._CArgObject) -> int:  # noqa: N802
        count._obj.value = 8  # type: ignore[attr-defined]
        return 0

    def cuDeviceGet(self, device: ctypes._CArgObject, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal  # type: ignore[attr-defined]
        return 0

    def cuDeviceGetAttribute(self, value: ctypes._CArgObject, attribute: int, device: ctypes.c_int) -> int:  # noqa: N802
        assert attribute == 124
        value._obj.value = self.dma_buf or device.value < 7  # type: ignore[attr-defined]
        return 0


@pytest.mark.parametrize(
    ("module", "dma_buf", "state", "value"),
    [
        ("module/nvidia_peermem", 0, "ok", "nvidia_peermem"),
        ("kernel/mm/memory_peers/nv_mem", 0, "ok", "nvidia_peermem"),
        (None, 1, "ok", "dma-buf"),
        (None, 0, "warning", "missing"),  # one of the GPUs cannot
    ],
)
def test_network_cards_reach_the_memory_of_gpus(
    module: str | None, dma_buf: int, state: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interconnect, "SYS", tmp_path)
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: Driver(dma_buf))
    assert direct(SEVERAL).state == "skipped"  # no card
    with_cards(tmp_path, EIGHT)
    if module is not None:
        (tmp_path / module).mkdir(parents=True)
        (tmp_path / module / "version").write_text("1")
    check = direct(SEVERAL)
    assert (check.state, check.value) == (state, value)
    assert direct(ALONE).state == direct(ON_CPUS).state == "skipped"


@pytest.mark.parametrize(
    ("switches", "states", "process", "error", "state"),
    [
        (4, "Completed\\nCompleted", "", 0, "ok"),
        (4, "Completed\\nNot Started", "", 0, "warning"),
        (0, "Completed\\nIn Progress", "", 0, "warning"),  # Blackwell has no such devices
        (4, "", "", 802, "failed"),
        (0, "[N/A]", "", 0, "skipped"),
        (6, "[N/A]", "nv-fabricmanage", 0, "ok"),  # before Hopper
        (6, "[N/A]", "sshd", 0, "warning"),
        (0, "", "", 0, "skipped"),
    ],
)
def test_a_machine_with_nvswitches_needs_its_fabric_manager(
    switches: int,
    states: str,
    process: str,
    error: int,
    state: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder in ("dev", "proc/1", "proc/77", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    for number in range(switches):
        (tmp_path / f"dev/nvidia-nvswitch{number}").touch()
    (tmp_path / "dev/nvidia-nvswitchctl").touch()
    (tmp_path / "proc/1/comm").write_text("systemd\n")
    (tmp_path / "proc/77/comm").write_text(f"{process}\n")
    if states:
        (tmp_path / "bin/nvidia-smi").write_text(f"#!/bin/sh\nprintf '{states}\\n'\n")
        (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin:/usr/bin")
    monkeypatch.setattr(interconnect, "DEV", tmp_path / "dev")
    monkeypatch.setattr(interconnect, "PROC", tmp_path / "proc")
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: Driver(error=error))
    check = fabric_manager(ALONE)
    assert check.state == state
    assert state in ("ok", "skipped") or "nvidia-fabricmanager" in str(check.hint)
    assert fabric_manager(ON_CPUS).state == "skipped"
    assert host.gpus(ALONE).state == ("skipped" if error else "ok")


def test_processes_of_the_host_are_not_seen_from_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-nvswitch0").touch()
    monkeypatch.setattr(interconnect, "DEV", tmp_path)
    monkeypatch.setattr(interconnect, "PROC", tmp_path)
    monkeypatch.setattr(interconnect, "_states", lambda: ["[N/A]"])
    monkeypatch.setattr(gpus, "ctypes", SimpleNamespace(CDLL=lambda name: Driver(), byref=ctypes.byref))
    assert fabric_manager(ALONE).state == "ok"
