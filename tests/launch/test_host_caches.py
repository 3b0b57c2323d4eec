"""Hosts with a `data.cache` each share blocks. If it fails, ranks train on other documents, or each host packs all."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.config.load import load
from engine.data.cache import IDENTITY
from engine.launch.run import train
from tests.launch.cached import STEPS, documents, ledger, packed, settings, validated
from tests.launch.hosts import Hosts, why_not
from tests.launch.ports import listening
from tests.launch.small_run import ONE_THREAD, has_trained, losses, wait
from tests.trainer.worlds import in_worlds

pytestmark = pytest.mark.world

MESH = ["parallel.tp=2", "parallel.pp=2"]


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


def planning(hosts: Hosts, host: int) -> list[psutil.Process]:
    """The planning process of a host, which its first rank has started."""
    found = (one for one in hosts.processes(clients=False) if hosts.host_of(one) == host)
    return [
        one
        for one in found
        if "multiprocessing.spawn" in " ".join(one.cmdline()) and "engine.trainer" in one.parent().cmdline()
    ]


def test_hosts_with_a_cache_each_train_as_one_host_does(root: Path, hosts: Hosts) -> None:
    """On tp and pp axes, with masks, while one planning process is killed and the other stopped.

    Losses, validation losses and the ledger are equal to the byte. Blocks are packed once, the others listen at the
    address of the link alone, and no rank file is left.
    """
    out, hostfile = root / "shared", root / "hosts"
    hostfile.write_text("".join(f"{address} slots=2\n" for address in hosts.addresses))
    command = [*ONE_THREAD, "train", *settings(root, "shared", "cache", *MESH), "--hostfile", str(hostfile)]
    process = hosts.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        wait(lambda: has_trained(out, 2), 400, process.poll)
        assert listening(hosts.processes(clients=False)) == set(hosts.addresses)
        before = [packed(hosts.of_host(number)) for number in range(2)]
        assert before[0] and not before[1], "the launcher has packed all of so few documents, and gives them away"
        (victim,) = planning(hosts, 0)
        victim.send_signal(signal.SIGKILL)
        wait(lambda: has_trained(out, 5), 200, process.poll)
        for stopped in planning(hosts, 1):
            stopped.send_signal(signal.SIGSTOP)
        _, said = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, said
    wait(lambda: not hosts.processes(), 10)

    with pytest.MonkeyPatch.context() as patch:
        in_worlds(patch, STEPS)
        train(load([*settings(root, "alone", "other", *MESH), "cluster.ranks_per_node=4"]), say=lambda line: None)
    assert losses(out) == losses(root / "alone") and validated(out) == validated(root / "alone") != []
    assert ledger(out) == ledger(root / "alone") and len(ledger(out)) == 4

    caches = [hosts.of_host(number) for number in range(2)]
    assert packed(caches[0]) == packed(root / "other")
    assert all([*cache.glob(".*")] == [cache / IDENTITY] for cache in caches)
