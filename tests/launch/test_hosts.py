"""Training over two hosts with a real link and real ssh. If it fails, clusters do not train, or hang for ever."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.config.load import load
from engine.launch.run import train
from tests.launch.hosts import ADDRESSES, Hosts, why_not

pytestmark = pytest.mark.world

SMALL = ["recipe=quickstart", "model.layers=1", "context=256", "capacity=128", "batch_tokens=512", "run.restarts=0"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(12):
        (folder / f"{number}.py").write_text(f"print({number})\n" * 300)
    return folder


def settings(out: Path, data: Path, steps: int, *more: str) -> list[str]:
    sizes = [f"run.steps={steps}", "run.checkpoint_every=3", "data.validation_share=0"]
    return [*SMALL, *sizes, f"run.out={out}", f"data.path={data}", *more]


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), "each step once"
    return [line["loss"] for line in lines]


def start(hosts: Hosts, words: list[str], hostfile: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bytescale_cli", "train", *words, "--hostfile", str(hostfile)]
    return hosts.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def no_process_is_left(hosts: Hosts, seconds: float) -> bool:
    """Whether all processes of both hosts end; the agent on a host that is cut off needs its time to notice."""
    return wait(lambda: not hosts.processes(), seconds)


def wait(due: Callable[[], bool], seconds: float) -> bool:
    last = time.monotonic() + seconds
    while not due():
        if time.monotonic() > last:
            return False
        time.sleep(0.05)
    return True


def test_two_hosts_train_as_one_does(tmp_path: Path, data: Path, hosts: Hosts) -> None:
    """gloo must advertise the address of the link, not that of the host's own name, and the losses be equal."""
    train(load(settings(tmp_path / "one", data, 4)), say=lambda line: None)
    process = start(hosts, settings(tmp_path / "two", data, 4), hosts.hostfile)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert losses(tmp_path / "two") == losses(tmp_path / "one") and len(losses(tmp_path / "two")) == 4
    assert no_process_is_left(hosts, 10)


def test_a_host_that_cannot_be_reached_is_named_with_the_error_of_ssh(tmp_path: Path, data: Path, hosts: Hosts) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"{ADDRESSES[0]} slots=1\n10.213.0.77 slots=1\n")
    process = start(hosts, settings(tmp_path / "run", data, 4), hostfile)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 3, said
    assert "10.213.0.77 cannot run ranks: ssh ended with code 255: ssh: connect to host 10.213.0.77 port 22:" in said
    assert "check `ssh 10.213.0.77`" in said
    assert not (tmp_path / "run" / "metrics.jsonl").read_text() and no_process_is_left(hosts, 10)


def test_a_cut_link_ends_the_run_and_the_same_command_resumes_it(tmp_path: Path, data: Path, hosts: Hosts) -> None:
    out, steps = tmp_path / "cut", 40
    metrics = out / "metrics.jsonl"
    process = start(hosts, settings(out, data, steps), hosts.hostfile)
    try:
        assert wait(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 4, 200)
        hosts.link("down")
        cut = time.monotonic()
        _, said = process.communicate(timeout=100)
        noticed = time.monotonic() - cut
        assert process.returncode == 124, said
        assert f"{ADDRESSES[1]} was lost" in said or f"{ADDRESSES[1]} has not answered" in said
        assert "the same command" in said
        assert noticed < 80  # with the report of the run
        assert no_process_is_left(hosts, 40), "the agent of the other host ends its ranks"
    finally:
        hosts.link("up")
        process.kill()
    done = len(losses(out))
    assert 4 <= done < steps
    again = start(hosts, settings(out, data, steps), hosts.hostfile)
    _, said = again.communicate(timeout=240)
    assert again.returncode == 0 and "resuming from" in said, said
    train(load(settings(tmp_path / "whole", data, steps)), say=lambda line: None)
    assert losses(out) == losses(tmp_path / "whole")
