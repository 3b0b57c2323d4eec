"""Runs on Ray that cannot be: one error with exit code 3, before anything is written."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.remote import checks, probe
from engine.remote.node import free_port
from engine.remote.plane import TOKEN, TOKEN_PATH
from tests.bytescale_cli.failures import failed

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host with Ray 2.60.0, without a token, and with enough shared memory."""
    monkeypatch.setattr(checks, "version", lambda: "2.60.0")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in (TOKEN, TOKEN_PATH):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stranger() -> Iterator[str]:
    """The address of a process that listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, key: str, *more: str) -> str:
    """Train on Ray, which must fail with exit code 3 at this key; return the hint and the message."""
    out = tmp_path / "run"
    answer = failed(capsys, ["train", "recipe=quickstart", f"run.out={out}", "data.runtime=ray", *more], 3, key)
    assert not out.exists()
    return f"{answer['error']['message']} {answer['error']['hint']}"


def test_ray_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "version", lambda: None)
    assert "pip install ray" in refused(capsys, tmp_path, "data.runtime=ray")


def test_no_package_makes_certificates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "has_certificates", lambda: False)
    assert "cryptography" in refused(capsys, tmp_path, "data.runtime=ray")


def test_shared_memory_is_too_small(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    assert "64.0 MiB" in refused(capsys, tmp_path, "data.ray.memory")


def test_no_token_for_a_cluster_that_runs_already(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = refused(capsys, tmp_path, "data.ray.address", "data.ray.address=127.0.0.1:6379")
    assert TOKEN_PATH in said


def test_an_address_at_which_no_process_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(TOKEN, "x")
    address = f"data.ray.address=127.0.0.1:{free_port('127.0.0.1')}"
    refused(capsys, tmp_path, address, address)


def test_what_listens_does_not_answer_as_ray(
    stranger: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(TOKEN, "x")
    monkeypatch.setattr(probe, "_TIMEOUT_S", 0.5)
    assert stranger in refused(capsys, tmp_path, f"data.ray.address={stranger}", f"data.ray.address={stranger}")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ('{"error": "AuthenticationError: the token is incorrect. Advice"}', TOKEN_PATH),
        ('{"version": "2.61.0", "resources": ["bytescale-host-0"]}', "pip install ray==2.61.0"),
        ('{"version": "2.60.0", "resources": ["bytescale-host-1"]}', "bytescale-host-0"),
        ("", "no answer"),
    ],
)
def test_what_ray_answers_may_refuse_a_host(
    answer: str,
    says: str,
    stranger: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv(TOKEN, "x")
    done = SimpleNamespace(stdout=answer.encode(), stderr=b"")
    monkeypatch.setattr(probe.subprocess, "run", lambda *command, **how: done)
    said = refused(capsys, tmp_path, f"data.ray.address={stranger}", f"data.ray.address={stranger}")
    assert says in said and "Advice" not in said
