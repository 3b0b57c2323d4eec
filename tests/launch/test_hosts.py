"""Training over hosts with real links and real ssh. If it fails, clusters do not train, or hang for ever."""

from __future__ import annotations

import functools
import getpass
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from engine.config.load import load
from engine.control.signals import STOP_SIGNALS
from engine.launch.run import train
from engine.run.launches import read_launches
from tests.launch.hosts import Hosts, why_not
from tests.launch.ports import connected, listening

pytestmark = pytest.mark.world

SMALL = ["recipe=quickstart", "model.layers=1", "context=256", "capacity=128", "batch_tokens=512", "run.restarts=0"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(tmp_path_factory.mktemp("hosts"), 3)
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(12):
        (folder / f"{number}.py").write_text(f"print({number})\n" * 300)
    return folder


STEPS = 16


def settings(out: Path, data: Path, steps: int = STEPS) -> list[str]:
    sizes = [f"run.steps={steps}", "run.checkpoint_every=3", "data.validation_share=0"]
    return [*SMALL, *sizes, f"run.out={out}", "data=stdlib", f"data.path={data}"]


@pytest.fixture(scope="module")
def of_one_host(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Callable[[int], list[float]]:
    """The losses of a number of ranks on one host, which nothing interrupts. They train once, if needed."""

    @functools.cache
    def trained(ranks: int) -> list[float]:
        out = tmp_path_factory.mktemp("one") / "run"
        config = load([*settings(out, data), f"cluster.ranks_per_node={ranks}"])
        train(config, say=lambda line: None)
        found = losses(out)
        assert len(found) == STEPS
        return found

    return trained


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "each step once"
    return [line["loss"] for line in lines]


def start(hosts: Hosts, words: list[str], hostfile: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bytescale_cli", "train", *words, "--hostfile", str(hostfile)]
    return hosts.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def no_process_is_left(hosts: Hosts, seconds: float) -> bool:
    """Whether all processes of all hosts end; the agent on a host that is cut off needs its time to notice."""
    return wait(lambda: not hosts.processes(), seconds)


def wait(due: Callable[[], bool], seconds: float) -> bool:
    last = time.monotonic() + seconds
    while not due():
        if time.monotonic() > last:
            return False
        time.sleep(0.05)
    return True


def test_a_cut_link_ends_the_run_and_the_same_command_resumes_it(
    tmp_path: Path, data: Path, hosts: Hosts, of_one_host: Callable[[int], list[float]]
) -> None:
    """The host whose link is cut is named, not the other one, whose rank waits for it."""
    out = tmp_path / "cut"
    metrics = out / "metrics.jsonl"
    process = start(hosts, settings(out, data), hosts.hostfile(3))
    try:
        assert wait(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 4, 200)
        hosts.link(2, "down")
        cut = time.time()
        expected = of_one_host(3)  # meanwhile nothing moves on the hosts
        _, said = process.communicate(timeout=100)
        assert process.returncode == 124, said
        _, other, third = hosts.addresses
        (cause,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert f"{third} was lost" in cause or f"{third} has not answered" in cause
        assert other not in cause
        assert f"train --resume {out}" in said
        (launch,) = read_launches(out / "launches.jsonl")
        assert launch.ended is not None and launch.ended - cut < 60
        assert no_process_is_left(hosts, 40), "the agent of the host that is cut off ends its ranks"
    finally:
        hosts.link(2, "up")
        process.kill()
    done = len(losses(out))
    assert 4 <= done < STEPS
    again = start(hosts, settings(out, data), hosts.hostfile(3))
    _, said = again.communicate(timeout=240)
    assert again.returncode == 0 and "resuming from" in said, said
    assert losses(out) == expected


@pytest.mark.parametrize("count", [2, 3])
def test_hosts_train_as_one_does(
    tmp_path: Path, data: Path, hosts: Hosts, of_one_host: Callable[[int], list[float]], count: int
) -> None:
    """gloo must advertise the address of the link, not that of the host's own name, and the losses be equal."""
    # With a user, who is for ssh alone.
    process = start(hosts, settings(tmp_path / "run", data), hosts.hostfile(count, f"{getpass.getuser()}@"))
    expected = of_one_host(count)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert losses(tmp_path / "run") == expected
    assert no_process_is_left(hosts, 10)


def test_a_run_listens_at_the_address_of_the_link_only_and_a_stopped_agent_leaves_nothing(
    tmp_path: Path, data: Path, hosts: Hosts
) -> None:
    """Ports are for the hosts of the run; none is left open for those that could connect without its secret."""
    out = tmp_path / "run"
    process = start(hosts, settings(out, data, 4000), hosts.hostfile(2))
    listened, links = set[str](), set[str]()

    def steps() -> bool:
        started = hosts.processes(clients=False)
        listened.update(listening(started))
        links.update(connected(started))
        return (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_bytes().count(b"\n") >= 2

    assert wait(steps, 200)
    assert listened == links == set(hosts.addresses[:2]), "those of the link"
    left = hosts.processes(clients=False)
    assert not listening(left), "all have connected"
    (agent,) = (one for one in left if is_agent(one) and hosts.host_of(one) == 1)
    agent.suspend()
    _, said = process.communicate(timeout=100)
    assert process.returncode == 124 and f"{hosts.addresses[1]} has not answered for 20 s" in said, said
    assert no_process_is_left(hosts, 10), [one.cmdline() for one in hosts.processes()]


def is_agent(process: psutil.Process) -> bool:
    """Whether it is an agent, and not the client or the shell that has started it."""
    return process.cmdline()[-2:] == ["-m", "engine.launch.agents.agent"] and process.name().startswith("python")


def test_a_signal_to_the_launcher_and_its_ssh_saves_a_checkpoint(tmp_path: Path, data: Path, hosts: Hosts) -> None:
    """As a scheduler does that signals all processes of a job. ssh must keep the signals ignored."""
    out = tmp_path / "run"
    process = start(hosts, settings(out, data, 400), hosts.hostfile(2))
    assert wait(lambda: (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_bytes()) > 0, 200)
    clients = [one for one in hosts.processes() if one.name() == "ssh"]
    assert len(clients) == 2
    for number in STOP_SIGNALS:
        for client in clients:
            client.send_signal(number)
    process.send_signal(signal.SIGUSR1)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 75 and "stopped on request" in said, said
    assert any((out / "checkpoints").iterdir()) and no_process_is_left(hosts, 10)


def test_a_host_that_cannot_be_reached_is_named_with_the_error_of_ssh(tmp_path: Path, data: Path, hosts: Hosts) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"{hosts.addresses[0]} slots=1\n10.213.0.77 slots=1\n")
    process = start(hosts, settings(tmp_path / "run", data), hostfile)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 3, said
    assert "10.213.0.77 cannot run ranks: ssh ended with code 255: ssh: connect to host 10.213.0.77 port 22:" in said
    assert "check `ssh 10.213.0.77`" in said
    assert not (tmp_path / "run" / "metrics.jsonl").read_text() and no_process_is_left(hosts, 10)
