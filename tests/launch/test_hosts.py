"""Training over hosts with real links and real ssh. If it fails, clusters do not train, or hang for ever."""

from __future__ import annotations

import getpass
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.control.signals import STOP_SIGNALS
from engine.run.checkpoints import newest_first, read
from engine.run.launches import read_launches
from tests.launch.hosts import Hosts, why_not
from tests.launch.ports import connected, listening
from tests.launch.small_run import SmallRun, has_trained, losses, wait

pytestmark = pytest.mark.world

STEPS = 16


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(tmp_path_factory.mktemp("hosts"), 3)
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    return SmallRun(tmp_path_factory.mktemp("data"), STEPS)


def start(hosts: Hosts, command: list[str], hostfile: Path) -> subprocess.Popen[str]:
    return hosts.start([*command, "--hostfile", str(hostfile)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def no_process_is_left(hosts: Hosts, seconds: float) -> None:
    """Wait for all processes of all hosts; the agent on a host that is cut off needs its time to notice."""
    wait(lambda: not hosts.processes(), seconds, lambda: [one.cmdline() for one in hosts.processes()])


def test_a_cut_link_ends_the_run_and_the_same_command_resumes_it(tmp_path: Path, small: SmallRun, hosts: Hosts) -> None:
    """The host whose link is cut is named, not the other one, whose rank waits for it."""
    out = tmp_path / "cut"
    process = start(hosts, small.command(out), hosts.hostfile(3))
    try:
        wait(lambda: has_trained(out, 4), 200)
        hosts.link(2, "down")
        cut = time.time()
        expected = small.expected(3)  # meanwhile nothing moves on the hosts
        _, said = process.communicate(timeout=100)
        assert process.returncode == 124, said
        _, other, third = hosts.addresses
        (cause,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert third in cause and other not in cause
        assert f"train --resume {out}" in said
        (launch,) = read_launches(out / "launches.jsonl")
        assert launch.ended is not None and launch.ended - cut < 60
        no_process_is_left(hosts, 40)
    finally:
        hosts.link(2, "up")
        process.kill()
    done = len(losses(out))
    assert 4 <= done < STEPS
    again = start(hosts, small.command(out), hosts.hostfile(3))
    _, said = again.communicate(timeout=240)
    assert again.returncode == 0 and "resuming from" in said, said
    assert losses(out) == expected


@pytest.mark.parametrize("count", [2, 3])
def test_hosts_train_as_one_does(tmp_path: Path, small: SmallRun, hosts: Hosts, count: int) -> None:
    """gloo must advertise the address of the link, not that of the host's own name, and the losses be equal."""
    # With a user, who is for ssh alone.
    process = start(hosts, small.command(tmp_path / "run"), hosts.hostfile(count, f"{getpass.getuser()}@"))
    expected = small.expected(count)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert losses(tmp_path / "run") == expected
    saved = newest_first(tmp_path / "run" / "checkpoints")[0]
    nodes = sorted(path.name for path in (saved / "zero").iterdir())
    assert nodes == [f"ranks-{rank:05d}-{rank:05d}.states" for rank in range(count)], "one rank on each"
    assert read(saved).ranks == count
    no_process_is_left(hosts, 10)


def test_a_run_listens_at_the_address_of_the_link_only_and_a_stopped_agent_leaves_nothing(
    tmp_path: Path, small: SmallRun, hosts: Hosts
) -> None:
    """Ports are for the hosts of the run; none is left open for those that could connect without its secret."""
    out = tmp_path / "run"
    process = start(hosts, small.command(out, steps=4000), hosts.hostfile(2))
    listened, links = set[str](), set[str]()

    def steps() -> bool:
        started = hosts.processes(clients=False)
        listened.update(listening(started))
        links.update(connected(started))
        return has_trained(out, 2)

    wait(steps, 200)
    assert listened == links == set(hosts.addresses[:2]), "those of the link"
    left = hosts.processes(clients=False)
    assert not listening(left), "all have connected"
    (agent,) = (one for one in left if is_agent(one) and hosts.host_of(one) == 1)
    agent.suspend()
    _, said = process.communicate(timeout=100)
    assert process.returncode == 124 and f"rank-1.log: {hosts.addresses[1]} " in said, said
    no_process_is_left(hosts, 10)


def is_agent(process: psutil.Process) -> bool:
    """Whether it is an agent, and not the client or the shell that has started it."""
    return process.cmdline()[-2:] == ["-m", "engine.launch.agents.agent"] and process.name().startswith("python")


def test_a_signal_to_the_launcher_and_its_ssh_saves_a_checkpoint(tmp_path: Path, small: SmallRun, hosts: Hosts) -> None:
    """As a scheduler does that signals all processes of a job. ssh must keep the signals ignored."""
    out = tmp_path / "run"
    process = start(hosts, small.command(out, steps=400), hosts.hostfile(2))
    wait(lambda: has_trained(out, 1), 200)
    clients = [one for one in hosts.processes() if one.name() == "ssh"]
    assert len(clients) == 2
    for number in STOP_SIGNALS:
        for client in clients:
            client.send_signal(number)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 75, said
    assert any((out / "checkpoints").iterdir())
    no_process_is_left(hosts, 10)
