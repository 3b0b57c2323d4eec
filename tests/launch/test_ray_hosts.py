"""Runs on Ray on several hosts. If it fails, ranks train on other documents than with the local runtime."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config.load import load
from engine.data.runtime.events import read_events
from engine.launch.run import train
from engine.run.folder import RunFolder
from tests.launch.cached import STEPS, documents, ledger, packed, settings, validated
from tests.launch.hosts import Hosts, why_not
from tests.launch.ports import listening
from tests.launch.small_run import ONE_THREAD, has_trained, losses, wait
from tests.trainer.worlds import in_worlds

pytestmark = [pytest.mark.world, pytest.mark.slow]

RAY = ["data.runtime=ray", "data.ray.memory=500MiB", "data.ray.deadline=3"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return documents(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(tmp_path_factory.mktemp("hosts"), 2, own=root / "cache")
    yield hosts
    hosts.close()


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


@pytest.mark.parametrize("mesh", [[], ["parallel.tp=2", "parallel.pp=2"]], ids=["hdp", "tp-pp"])
@pytest.mark.parametrize("harm", ["well", "actors", "ray"])
def test_two_hosts_on_ray_train_as_one_host_does(root: Path, hosts: Hosts, mesh: list[str], harm: str) -> None:
    """With texts, and chats with masks; while the actor of one host is killed and that of the other stopped.

    Or while the server of Ray's head is killed, and then all of Ray on the other host.
    """
    name = f"{len(mesh)}-{harm}"
    out, hostfile = root / f"ray-{name}", root / "hosts"
    hostfile.write_text("".join(f"{address} slots=2\n" for address in hosts.addresses))
    command = [*ONE_THREAD, "train", *settings(root, out.name, "cache", *mesh), *RAY, "--hostfile", str(hostfile)]
    process = hosts.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
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
    wait(lambda: not hosts.processes(), 10)

    with pytest.MonkeyPatch.context() as patch:
        in_worlds(patch, STEPS)
        alone = settings(root, f"alone-{name}", "other", *mesh)
        train(load([*alone, "cluster.ranks_per_node=4"]), say=lambda line: None)
    there = root / f"alone-{name}"
    assert losses(out) == losses(there) and validated(out) == validated(there) != []
    assert ledger(out) == ledger(there) and len(ledger(out)) == 4
    lost = {event["role"] for event in events(out, "lost")} - {"standby", "planner"}
    assert lost == {"well": set(), "actors": {"host-0", "host-1"}, "ray": {"host-1"}}[harm]
    assert packed(hosts.of_host(0)) | packed(hosts.of_host(1)) == packed(root / "other")
