"""The doctor and two hosts with a real link and real ssh (tests/launch/hosts.py). Faults of hosts: test_planted.py."""

from __future__ import annotations

import getpass
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.planted import named, quick, read, wrong_ones
from tests.launch.hosts import Hosts, why_not

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(tmp_path_factory.mktemp("hosts"), 2)
    yield hosts
    hosts.close()


def examined(hosts: Hosts, out: Path, hostfile: Path) -> dict[str, Any]:
    command = quick(f"run.out={out}", f"data.cache={out}", "--hostfile", str(hostfile))
    process = hosts.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, said = process.communicate(timeout=120)
    assert not hosts.processes(), "the programs on both hosts have ended"
    return read(output, said, process.returncode)


def test_two_hosts_are_well(tmp_path: Path, hosts: Hosts) -> None:
    doctor = examined(hosts, tmp_path, hosts.hostfile(2, f"{getpass.getuser()}@"))
    assert {name for name in wrong_ones(doctor) if name.startswith("host ")} == set()
    for number in (1, 2):
        assert named(doctor, f"host {number}: ssh")["state"] == "ok"
        assert abs(float(named(doctor, f"host {number}: clock")["value"].removesuffix(" s"))) < 0.5
    assert named(doctor, "host 2: interfaces")["value"] == hosts.cards[1]
    assert named(doctor, "host 2: rendezvous")["state"] == "ok"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_host_that_cannot_be_reached_does_not_hide_the_others(tmp_path: Path, hosts: Hosts) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"10.213.0.77 slots=1\n{hosts.addresses[1]} slots=1\n")
    doctor = examined(hosts, tmp_path, hostfile)
    found = named(doctor, "host 1: ssh")
    assert found["state"] == "failed" and "ssh 10.213.0.77" in found["hint"]
    assert "ssh ended with code 255: ssh: connect to host" in found["message"]
    assert named(doctor, "host 2: run folder")["state"] == "ok"


def test_a_run_folder_that_a_host_has_for_itself(tmp_path: Path, hosts: Hosts) -> None:
    sshd = (hosts.folder / f"{hosts.names[1]}.pid").read_text().strip()
    inside = ["nsenter", "--target", sshd, "--mount"]
    private = tmp_path / "run"
    private.mkdir()
    subprocess.run([*inside, "mount", "-t", "tmpfs", "none", str(private)], check=True)
    try:
        doctor = examined(hosts, private, hosts.hostfile(2))
    finally:
        subprocess.run([*inside, "umount", str(private)], check=True)
    assert named(doctor, "host 2: run folder")["state"] == "failed"
    assert named(doctor, "host 1: run folder")["state"] == "ok"
