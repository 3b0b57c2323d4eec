"""Hosts with a `data.cache` each share blocks. If it fails, ranks train on other documents, or each host packs all."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from engine.data.cache import IDENTITY
from tests.launch.cached import MESH, hosts, is_that_of_one_host, lacks_a_file, packed, root, start  # noqa: F401
from tests.launch.hosts import Hosts
from tests.launch.ports import listening
from tests.launch.small_run import has_trained, wait

pytestmark = pytest.mark.world


def planning(hosts: Hosts, host: int) -> list[psutil.Process]:  # noqa: F811
    """The planning process of a host, which its first rank has started."""
    found = list[psutil.Process]()
    for one in hosts.processes(clients=False):
        with suppress(psutil.NoSuchProcess):  # it has ended since
            spawned, parent = "multiprocessing.spawn" in " ".join(one.cmdline()), one.parent()
            if spawned and parent and "engine.trainer" in parent.cmdline() and hosts.host_of(one) == host:
                found.append(one)
    return found


def test_hosts_with_a_cache_each_train_as_one_host_does(root: Path, hosts: Hosts) -> None:  # noqa: F811
    """On tp and pp axes, with chats and their masks, while one planning process is killed and the other stopped.

    Blocks are packed once, the others listen at the address of the link alone, and no rank file is left.
    """
    out = root / "shared"
    process = start(root, hosts, out.name, *MESH)
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
    is_that_of_one_host(root, hosts, out.name, MESH)
    caches = [hosts.of_host(number) for number in range(2)]
    assert packed(caches[0]) == before[0]  # those that the launcher had packed are all
    assert all([*cache.glob(".*")] == [cache / IDENTITY] for cache in caches)


def test_a_file_that_one_host_lacks_ends_the_run_before_its_first_step(
    root: Path,  # noqa: F811
    hosts: Hosts,  # noqa: F811
    tmp_path: Path,
) -> None:
    line = lacks_a_file(root, hosts, tmp_path, "lacking")
    assert "'texts'" in line and f"on {hosts.addresses[1]}" in line
