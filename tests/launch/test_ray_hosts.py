"""Runs on Ray on several hosts. If it fails, ranks train on other documents than with the local runtime."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.data.runtime.events import read_events
from engine.run.folder import RunFolder
from tests.launch.cached import MESH, hosts, is_that_of_one_host, lacks_a_file, root, start  # noqa: F401
from tests.launch.hosts import Hosts
from tests.launch.ports import listening
from tests.launch.small_run import has_trained, wait

pytestmark = [pytest.mark.world, pytest.mark.slow]

RAY = ["data.runtime=ray", "data.ray.memory=500MiB", "data.ray.deadline=3"]


def events(out: Path, what: str) -> list[dict[str, Any]]:
    return [event for event in read_events(RunFolder(out)) if event["what"] == what]


def process_of(out: Path, role: str) -> psutil.Process:
    """The process that has taken a role last. Hosts of network namespaces share numbers of processes."""
    return psutil.Process([event["pid"] for event in events(out, "taken") if event["role"] == role][-1])


def ray_of(out: Path, host: int) -> list[psutil.Process]:
    """On the first host the server of the head; on the other one all of Ray, with its actors, but not its guard."""
    guard = process_of(out, f"host-{host}")
    while "engine.remote.guard" not in guard.cmdline():
        guard = guard.parent()
    below = [one for one in guard.children(recursive=True) if "engine.remote.guard" not in one.cmdline()]
    return [one for one in below if host or one.name() == "gcs_server"]


@pytest.mark.parametrize("mesh", [(), MESH], ids=["hdp", "tp-pp"])
@pytest.mark.parametrize("harm", ["well", "actors", "ray"])
def test_two_hosts_on_ray_train_as_one_host_does(
    root: Path,  # noqa: F811
    hosts: Hosts,  # noqa: F811
    mesh: Sequence[str],
    harm: str,
) -> None:
    """With texts, and chats with masks; while the actor of one host is killed and that of the other stopped.

    Or while the server of Ray's head is killed, and then all of Ray on the other host.
    """
    out = root / f"ray-{len(mesh)}-{harm}"
    process = start(root, hosts, out.name, *mesh, *RAY)
    try:
        wait(lambda: len(events(out, "taken")) == 3 or process.poll() is not None, 600)
        assert process.poll() is None, process.communicate()
        # Ray's own servers listen on all interfaces if not on loopback (docs/security.md).
        assert listening(hosts.processes(clients=False)) <= {*hosts.addresses, "::"}
        wait(lambda: has_trained(out, 2), 200, process.poll)
        for host, how in enumerate([signal.SIGKILL, signal.SIGSTOP if harm == "actors" else signal.SIGKILL]):
            victims = [process_of(out, f"host-{host}")] if harm == "actors" else ray_of(out, host)
            for victim in victims if harm != "well" else []:
                victim.send_signal(how)
            wait(partial(has_trained, out, 6 + 4 * host), 200, process.poll)
            _, left = psutil.wait_procs(victims if harm != "well" else [], 10)
            assert not left
        _, said = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, said
    lost = {event["role"] for event in events(out, "lost")} - {"standby", "planner"}
    assert lost == {"well": set(), "actors": {"host-0", "host-1"}, "ray": {"host-1"}}[harm]
    is_that_of_one_host(root, hosts, out.name, mesh)


def test_a_file_that_one_host_lacks_ends_a_run_on_ray(
    root: Path,  # noqa: F811
    hosts: Hosts,  # noqa: F811
    tmp_path: Path,
) -> None:
    line = lacks_a_file(root, hosts, tmp_path, "lacking", *RAY)
    assert "'texts'" in line and f"on {hosts.addresses[1]}" in line
