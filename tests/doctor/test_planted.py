"""Faults of a machine or a host are named by `doctor --json`, and nothing else seems wrong because of them.

Each doctor is a process and has several faults that do not depend on each other. test_limits.py, test_software.py and
others have the single checks.
"""

from __future__ import annotations

import resource
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.sysfs import with_cards
from tests.doctor.planted import (
    ROOT,
    can_mount,
    environment,
    examined,
    installed,
    mounted,
    named,
    quick,
    ssh,
    wrong_ones,
)

pytestmark = pytest.mark.long

MOUNTS = can_mount()
# A config for GPUs, which this machine may lack: then that is wrong without any fault, too.
GPUS = ["cluster=h100x8", "cluster.ranks_per_node=1"]


def folders_in(place: Path) -> list[str]:
    """Make folders of a run, each of which may be broken alone."""
    for name in ("run", "cache"):
        (place / name).mkdir()
    return [f"run.out={place}/run", f"data.cache={place}/cache"]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What is wrong with this machine without any fault."""
    return wrong_ones(examined(quick(*GPUS, *folders_in(tmp_path_factory.mktemp("before")))))


def test_a_machine_with_a_full_disk_low_limits_and_wrong_variables(tmp_path: Path, before: set[str]) -> None:
    """gloo would fail in both parts of the two ranks, which are not tried."""
    command = ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *quick(*GPUS, *folders_in(tmp_path))]
    expected = {"open files", "torch", "interfaces", "environment"}
    if MOUNTS:
        command = mounted(tmp_path / "run", "512k", mounted(Path("/dev/shm"), "64k", command))
        expected |= {"run folder", "shared memory"}
    variables = {"GLOO_SOCKET_IFNAME": "eth77", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    site = installed(tmp_path / "site", "torch", "2.4.1")
    doctor = examined(command, environment(PYTHONPATH=str(site), **variables))
    assert wrong_ones(doctor) - before == expected
    values = {"open files": "200 files", "torch": "2.4.1", "run folder": "512.0 KiB free"}
    values["shared memory"] = "64.0 KiB free"
    assert {name: named(doctor, name)["value"] for name in values if name in expected} == {
        name: value for name, value in values.items() if name in expected
    }
    assert {named(doctor, part)["state"] for part in ("all-reduce", "ring")} == {"skipped"}
    assert named(doctor, "checkpoint")["state"] == ("skipped" if MOUNTS else "ok")


def test_folders_in_which_a_file_cannot_be_renamed_or_written(tmp_path: Path, before: set[str]) -> None:
    """Quotas are not seen before something is written."""
    broken = """
import errno, os, shutil
def refuse(path, target):
    if "/cache/" in str(path):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path), None, str(target))
    os.rename(path, target)
from pathlib import Path
Path.replace = refuse
shutil.disk_usage = lambda path: shutil._ntuple_diskusage(2**60, 0, 2**60)
"""
    command, expected = quick(*GPUS, *folders_in(tmp_path), broken=broken), {"data cache": "renamed"}
    if MOUNTS:
        command = mounted(tmp_path / "run", "512k", command)
        expected["run folder"] = "No space left on device"
    doctor = examined(command)
    assert wrong_ones(doctor) - before == set(expected)
    assert all(why in named(doctor, name)["message"] for name, why in expected.items())


SECOND = "10.213.7.2"  # the ssh of these tests needs no such host


def own_address() -> str:
    """The address of this machine on its route to other hosts, else one of its loopback interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((SECOND, 9))  # sends nothing
        except OSError:
            return "127.0.0.2"
        return str(probe.getsockname()[0])


def two_hosts(place: Path) -> list[str]:
    """The arguments of a doctor that checks two hosts."""
    (place / "hosts").write_text(f"{own_address()} slots=1\n{SECOND} slots=1\n")
    return [*folders_in(place), "--hostfile", f"{place}/hosts"]


@pytest.fixture
def hosts(tmp_path: Path) -> list[str]:
    return two_hosts(tmp_path)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    place = tmp_path_factory.mktemp("hosts")
    doctor = examined(quick(*two_hosts(place)), environment(ssh(place, "")))
    for name in ("ssh", "clock", "python", "bytescale", "packages", "run folder", "open files"):
        assert {named(doctor, f"host {n}: {name}")["state"] for n in (1, 2)} == {"ok"}
    assert named(doctor, "host 2: rendezvous")["state"] == "ok"
    return wrong_ones(doctor)


def second(tmp_path: Path, hosts: list[str], lines: str) -> dict[str, Any]:
    """Examine hosts of which the second one has a fault that these lines of shell cause."""
    lines = f'case "$*" in *{SECOND}*)\n{lines}\n;; esac'
    return examined(quick(*hosts), environment(ssh(tmp_path / "ill", lines)))


def test_many_hosts_need_more_files_than_a_process_may_usually_open(tmp_path: Path) -> None:
    """Each host takes two descriptors; select() only watches those below 1,024, which is also the usual limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("this machine allows too few open files")
    names = [f"127.9.{number >> 8}.{number & 255}" for number in range(520)]
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    words = [*folders_in(tmp_path), "--hostfile", f"{tmp_path}/hosts"]
    path = ssh(tmp_path, "read question; echo 'ssh: no route' >&2; exit 255")
    doctor = examined(["sh", "-c", 'ulimit -Sn 1024; exec "$@"', "sh", *quick(*words)], environment(path))
    found = [named(doctor, f"host {number}: ssh")["message"] for number in range(1, 521)]
    assert found == [f"{name}: ssh ended with code 255: ssh: no route" for name in names]


A_MINUTE_FAST = "import time\nnow = time.time\ntime.time = lambda: now() + 60\n"


def test_a_host_with_other_sources_packages_files_clock_and_limits(
    tmp_path: Path, hosts: list[str], healthy: set[str]
) -> None:
    for name in ("engine", "bytescale_cli", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / "other" / name, ignore=shutil.ignore_patterns("__pycache__"))
    units = tmp_path / "other" / "engine" / "units.py"
    units.write_text(units.read_text() + "# changed\n")
    site = installed(tmp_path / "site", "torch", "2.12.0")
    installed(site, "ray", "2.40.0")
    (site / "sitecustomize.py").write_text(A_MINUTE_FAST)
    faults = [
        f'command=$(echo "$command" | sed "s#cd [^ ]*#cd {tmp_path}/other#")',
        f"export PYTHONPATH={site}",
        "ulimit -n 200",
    ]
    expected = {f"host 2: {name}" for name in ("bytescale", "packages", "clock", "open files")}
    if MOUNTS:
        inside = f"mount -t tmpfs none {tmp_path}/run && exec sh -c "
        faults.append(f'exec unshare --mount sh -c \'{inside}"$0"\' "$command"')
        expected.add("host 2: run folder")
    on_ray = ["data.runtime=ray", "data.ray.memory=256MiB"]
    doctor = second(tmp_path, [*hosts, *on_ray], "\n".join(faults))
    assert wrong_ones(doctor) - healthy == expected
    assert float(named(doctor, "host 2: clock")["value"].removesuffix(" s")) == pytest.approx(60, abs=1)
    assert "torch 2.12.0" in named(doctor, "host 2: packages")["message"]
    assert "ray 2.40.0 instead of" in named(doctor, "host 2: packages")["message"]


def test_a_host_that_dies_in_the_middle(tmp_path: Path, hosts: list[str], healthy: set[str]) -> None:
    """The first question is answered; one failure says all."""
    (tmp_path / "site").mkdir()
    lines = "import os, platform\nplatform.python_version = lambda: os.kill(os.getpid(), 9)\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(lines)
    doctor = second(tmp_path, hosts, f"export PYTHONPATH={tmp_path}/site")
    assert wrong_ones(doctor) - healthy == {"host 2: versions"}


@pytest.mark.skipif(not MOUNTS, reason="this process may not mount a file system")
def test_a_host_with_other_network_cards(tmp_path: Path, hosts: list[str]) -> None:
    """Mixed or fewer cards make a run slow. On a host without InfiniBand, NCCL hangs."""
    up, ethernet = ("ACTIVE", "InfiniBand", 400.0), ("ACTIVE", "Ethernet", 100.0)
    cards = {f"mlx5_{number}:1": up for number in range(4)}
    first = with_cards(tmp_path / "first", cards)
    others = {"mixed": {**cards, "mlx5_9:1": ethernet}, "none": {}}
    states = {"mixed": ("ok", "warning"), "none": ("ok", "failed")}
    for name, ports in others.items():
        sys = with_cards(tmp_path / name, ports)
        inside = f'exec unshare --mount sh -c \'mount --rbind {sys} /sys && exec sh -c "$0"\' "$command"'
        path = ssh(tmp_path / f"ill-{name}", f'case "$*" in *{SECOND}*)\n{inside}\n;; esac')
        command = ["unshare", "--mount", "sh", "-c", f'mount --rbind {first} /sys && exec "$@"', "sh"]
        doctor = examined([*command, *quick(GPUS[0], *hosts)], environment(path))
        checks = [named(doctor, f"host {number}: InfiniBand") for number in (1, 2)]
        assert tuple(check["state"] for check in checks) == states[name]
        assert name != "mixed" or "NCCL_IB_HCA='=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1'" in checks[1]["hint"]
        assert checks[1]["section"] == "hosts" and SECOND in checks[1]["message"]
