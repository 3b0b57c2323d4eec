"""A host on which no rank could run is refused before any starts, with what is in the way."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest

from engine.config.load import load
from engine.errors import PreflightError
from engine.launch.checks import interface, ready
from engine.launch.checks.ready import Need, unready
from engine.launch.run import train
from tests.refusals import refused

ONE_HOST, ALONE = Need(2, 2, 1, False), Need(1, 1, 1, False)


def place(need: Need, **variables: str) -> str | None:
    """The place of the problem, without its value."""
    problem = unready(need, variables)
    return None if problem is None else str(problem.key).partition("=")[0]


def test_this_host_is_ready() -> None:
    assert place(ONE_HOST) is None and place(ONE_HOST, GLOO_SOCKET_IFNAME="lo") is None


@pytest.mark.parametrize(
    ("variable", "gpus", "nodes", "refused"),
    [
        ("GLOO_SOCKET_IFNAME", False, 1, True),
        ("GLOO_SOCKET_IFNAME", True, 1, False),
        ("GLOO_SOCKET_IFNAME", True, 2, True),  # agents listen there
        ("NCCL_SOCKET_IFNAME", True, 1, True),
        ("NCCL_SOCKET_IFNAME", False, 2, False),
    ],
)
def test_variables_that_are_used_must_name_interfaces_of_this_host(
    variable: str, gpus: bool, nodes: int, refused: bool
) -> None:
    assert place(Need(2, 4, nodes, gpus), **{variable: "eth99"}) == (variable if refused else None)


def test_an_interface_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "addresses_of", lambda name: [])
    assert place(ONE_HOST, GLOO_SOCKET_IFNAME="lo") == "GLOO_SOCKET_IFNAME"


def test_ranks_of_one_host_need_loopback_of_either_family(monkeypatch: pytest.MonkeyPatch) -> None:
    missing, create = {"127.0.0.1"}, socket.create_server

    def serve(where: tuple[str, int], **more: object) -> socket.socket:
        if where[0] in missing:
            raise OSError(99, "Cannot assign requested address")
        return create(where, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "create_server", serve)
    if interface.addresses_of("lo").count("::1"):
        assert place(ONE_HOST) is None
    missing.add("::1")
    assert place(ONE_HOST) == "loopback"
    assert place(ALONE) is None, "a single rank connects to nobody"
    assert place(Need(1, 2, 2, False)) is None, "ranks of other hosts are not reached over it"


@pytest.mark.parametrize(("hard", "world", "refused"), [(40, 2, True), (67, 2, True), (68, 2, False), (200, 96, True)])
def test_a_limit_of_open_files_that_no_rank_can_live_with(
    hard: int, world: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The soft limit is raised, so it does not count."""
    limits = {resource.RLIMIT_NOFILE: (20, hard), resource.RLIMIT_NPROC: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    assert place(ONE_HOST._replace(world=world)) == ("ulimit -n" if refused else None)


def test_a_container_without_threads_left_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(ready, "own_groups", lambda proc, cgroups, controller: [tmp_path])
    (tmp_path / "pids.max").write_text("110\n")
    (tmp_path / "pids.current").write_text("100\n")
    assert place(ONE_HOST) == "ulimit -u" and place(ALONE) is None


def test_a_launch_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    (tmp_path / "a.py").write_text("print(1)\n" * 500)
    settings = load(["recipe=quickstart", f"run.out={tmp_path / 'run'}", f"data.path={tmp_path}"])
    with refused(PreflightError, "GLOO_SOCKET_IFNAME=eth99"):
        train(settings)
    assert not (tmp_path / "run").exists()
