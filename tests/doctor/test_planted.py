"""Faults of a machine or a host are named by `doctor --json`, and nothing else seems wrong because of them.

Each doctor is a process. Tests are slow where those of a check (test_limits.py, test_software.py) have the fault.
"""

from __future__ import annotations

import resource
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

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

needs_mounts = pytest.mark.skipif(not can_mount(), reason="mounting is not permitted here")


def folders_in(place: Path) -> list[str]:
    """Make folders of a run, each of which may be broken alone."""
    for name in ("run", "cache"):
        (place / name).mkdir()
    return [f"run.out={place}/run", f"data.cache={place}/cache"]


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    return folders_in(tmp_path)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What is wrong with this machine without any fault."""
    return wrong_ones(examined(quick(*folders_in(tmp_path_factory.mktemp("before")))))


def newly(doctor: dict[str, Any], before: set[str]) -> set[str]:
    return wrong_ones(doctor) - before


@needs_mounts
def test_a_full_disk(tmp_path: Path, folders: list[str], before: set[str]) -> None:
    doctor = examined(mounted(tmp_path / "run", "512k", quick(*folders)))
    assert newly(doctor, before) == {"run folder"}
    found = named(doctor, "run folder")
    assert found["value"] == "512.0 KiB free" and "but a checkpoint takes" in found["message"]
    assert named(doctor, "checkpoint")["state"] == "skipped"


@needs_mounts
def test_a_disk_with_less_space_than_it_says(tmp_path: Path, folders: list[str], before: set[str]) -> None:
    """Quotas are not seen before something is written."""
    broken = "import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(2**60, 0, 2**60)"
    doctor = examined(mounted(tmp_path / "run", "512k", quick(*folders, broken=broken)))
    assert newly(doctor, before) == {"run folder"}
    assert "cannot be written and synced: No space left on device" in named(doctor, "run folder")["message"]


@pytest.mark.slow
@needs_mounts
def test_shared_memory_that_is_too_small(folders: list[str], before: set[str]) -> None:
    doctor = examined(mounted(Path("/dev/shm"), "64k", quick(*folders)))
    assert newly(doctor, before) == {"shared memory"}
    assert named(doctor, "shared memory")["value"] == "64.0 KiB free"
    assert "--shm-size" in named(doctor, "shared memory")["hint"]


@pytest.mark.slow
def test_a_low_limit_of_open_files(folders: list[str], before: set[str]) -> None:
    doctor = examined(["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *quick(*folders)])
    assert newly(doctor, before) == {"open files"}
    assert named(doctor, "open files")["value"] == "200 files"


@pytest.mark.slow
def test_a_torch_out_of_range(tmp_path: Path, folders: list[str], before: set[str]) -> None:
    path = installed(tmp_path / "site", "torch", "2.4.1")
    doctor = examined(quick(*folders), environment(PYTHONPATH=str(path)))
    assert newly(doctor, before) == {"torch"}
    found = named(doctor, "torch")
    assert found["value"] == "2.4.1" and "is needed" in found["message"] and "pip install" in found["hint"]


def test_a_folder_in_which_nothing_can_be_renamed(folders: list[str], before: set[str]) -> None:
    broken = """
import errno, os
def refuse(path, target):
    if "/run/" in str(path):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), str(path), None, str(target))
    os.rename(path, target)
from pathlib import Path
Path.replace = refuse
"""
    doctor = examined(quick(*folders, broken=broken))
    assert newly(doctor, before) == {"run folder"}
    assert "a file cannot be renamed: Operation not permitted" in named(doctor, "run folder")["message"]


def test_an_interface_that_is_not_there(folders: list[str], before: set[str]) -> None:
    """gloo would fail in both parts of the two ranks, which are not tried."""
    doctor = examined(quick(*folders), environment(GLOO_SOCKET_IFNAME="eth77"))
    assert newly(doctor, before) == {"interfaces"}
    assert "GLOO_SOCKET_IFNAME=eth77 names no interface" in named(doctor, "interfaces")["message"]
    assert {named(doctor, part)["state"] for part in ("all-reduce", "ring")} == {"skipped"}


def test_a_variable_that_puts_all_streams_into_one_queue(folders: list[str]) -> None:
    """It only matters to GPUs, which this machine may lack: that is wrong without the variable, too."""
    words = [*folders, "cluster=h100x8", "cluster.ranks_per_node=1"]
    before = wrong_ones(examined(quick(*words)))
    doctor = examined(quick(*words), environment(CUDA_DEVICE_MAX_CONNECTIONS="1"))
    assert newly(doctor, before) == {"environment"}


A_MINUTE_FAST = "import time\nnow = time.time\ntime.time = lambda: now() + 60\n"
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


def test_a_host_that_cannot_be_reached(tmp_path: Path, hosts: list[str], healthy: set[str]) -> None:
    said = f"ssh: connect to host {SECOND} port 22: No route to host"
    doctor = second(tmp_path, hosts, f"echo '{said}' >&2; exit 255")
    assert newly(doctor, healthy) == {"host 2: ssh"}
    assert said in named(doctor, "host 2: ssh")["message"]
    assert f"check `ssh {SECOND}`" in named(doctor, "host 2: ssh")["hint"]


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


def test_a_host_with_other_sources(tmp_path: Path, hosts: list[str], healthy: set[str]) -> None:
    for name in ("engine", "bytescale_cli", "recipes"):
        shutil.copytree(ROOT / name, tmp_path / "other" / name, ignore=shutil.ignore_patterns("__pycache__"))
    units = tmp_path / "other" / "engine" / "units.py"
    units.write_text(units.read_text() + "# changed\n")
    doctor = second(tmp_path, hosts, f'command=$(echo "$command" | sed "s#cd [^ ]*#cd {tmp_path}/other#")')
    assert newly(doctor, healthy) == {"host 2: bytescale"}


@pytest.mark.slow
def test_a_host_with_another_torch(tmp_path: Path, hosts: list[str], healthy: set[str]) -> None:
    path = installed(tmp_path / "site", "torch", "2.12.0")
    doctor = second(tmp_path, hosts, f"export PYTHONPATH={path}")
    assert newly(doctor, healthy) == {"host 2: packages"}
    assert "torch 2.12.0 instead of" in named(doctor, "host 2: packages")["message"]


def test_a_host_whose_clock_is_a_minute_off(tmp_path: Path, hosts: list[str], healthy: set[str]) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import time\nnow = time.time\ntime.time = lambda: now() + 60\n"
    )
    doctor = second(tmp_path, hosts, f"export PYTHONPATH={tmp_path}/site")
    assert newly(doctor, healthy) == {"host 2: clock"}
    assert float(named(doctor, "host 2: clock")["value"].removesuffix(" s")) == pytest.approx(60, abs=1)


@needs_mounts
def test_a_host_that_does_not_share_the_run_folder(tmp_path: Path, hosts: list[str], healthy: set[str]) -> None:
    inside = f"mount -t tmpfs none {tmp_path}/run && exec sh -c "
    doctor = second(tmp_path, hosts, f'exec unshare --mount sh -c \'{inside}"$0"\' "$command"')
    assert newly(doctor, healthy) == {"host 2: run folder"}


@pytest.mark.slow
def test_a_host_with_a_low_limit(tmp_path: Path, hosts: list[str], healthy: set[str]) -> None:
    doctor = second(tmp_path, hosts, "ulimit -n 200")
    assert newly(doctor, healthy) == {"host 2: open files"}


def test_a_host_that_dies_in_the_middle(tmp_path: Path, hosts: list[str], healthy: set[str]) -> None:
    """The first question is answered; one failure says all."""
    (tmp_path / "site").mkdir()
    lines = "import os, platform\nplatform.python_version = lambda: os.kill(os.getpid(), 9)\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(lines)
    doctor = second(tmp_path, hosts, f"export PYTHONPATH={tmp_path}/site")
    assert newly(doctor, healthy) == {"host 2: versions"}
