"""Ray's ports refuse callers that are not of the run. If not, whoever reaches a host runs code on it."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.remote.certificates import AUTHORITY, CERTIFICATE, KEY
from engine.remote.checks import own_environment
from engine.remote.node import NodeRay, token_of
from engine.remote.plane import START
from tests.remote.rays import said, session

pytest.importorskip("ray")
grpc = pytest.importorskip("grpc")
pytestmark = [pytest.mark.world, pytest.mark.long]

ACTOR = """
import os, sys
from engine.remote import cluster
import ray
cluster.connect("ports")
actor = ray.remote(num_cpus=0)(type("Role", (), {"pid": lambda self: os.getpid()})).remote()
print(ray.get(actor.pid.remote()), flush=True)
sys.stdin.read()
"""
# A head without certificates ends at this call, if it has no metadata.
STREAM, HEALTH = "/ray.rpc.syncer.RaySyncer/StartSync", "/grpc.health.v1.Health/Check"
SERVICES = {  # and the process that has each
    "ray.rpc.InternalKVGcsService": "gcs_server",
    "ray.rpc.ActorInfoGcsService": "gcs_server",
    "ray.rpc.NodeManagerService": "raylet",
    "ray.rpc.ObjectManagerService": "raylet",
    "ray.rpc.CoreWorkerService": "ray::Role",
}


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[NodeRay]:
    head = NodeRay.start_head("127.0.0.1", 0, 400 << 20, token_of(b"secret of the test"), tmp_path / "log")
    try:
        assert said(head) == ["up"]
        yield head
    finally:
        head.end()


@pytest.fixture
def actor(ray: NodeRay) -> Iterator[int]:
    environment = own_environment() | ray.environment | {START: "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", ACTOR], env=environment, text=True, **pipes) as driver:
        assert driver.stdout is not None
        yield int(driver.stdout.readline())


def methods() -> set[str]:
    """All methods that are named in Ray's programs."""
    spec = find_spec("ray")
    assert spec is not None and spec.origin is not None
    core = Path(spec.origin).parent / "core/src/ray"
    programs = [core / "gcs/gcs_server", core / "raylet/raylet"]
    found = [re.findall(rb"/ray\.rpc\.[\w.]+/\w+", program.read_bytes()) for program in programs]
    return {name.decode() for of_program in found for name in of_program}


def ports(ray: NodeRay, actor: int) -> set[tuple[str, int]]:
    """The names of the processes of a Ray, and of an actor, each with the ports at which it listens."""
    processes = [psutil.Process(pid) for pid in [*session(ray._guard.pid), actor]]
    listens = [(one, at) for one in processes for at in one.net_connections("tcp") if at.status == "LISTEN"]
    return {(one.name(), at.laddr.port) for one, at in listens}


def code(channel: Any, method: str, *metadata: tuple[str, str]) -> str:
    """The answer to a call without a token."""
    with channel:
        try:
            channel.unary_unary(method)(b"", timeout=20, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


def test_callers_without_a_certificate_or_a_token_are_refused(ray: NodeRay, actor: int) -> None:
    """Without a certificate at the connection. With one each method is refused, or that of another port."""
    folder = Path(ray._settings.folder)
    authority, key, certificate = ((folder / name).read_bytes() for name in (AUTHORITY, KEY, CERTIFICATE))
    strangers = [None, grpc.ssl_channel_credentials(authority)]
    inside = grpc.ssl_channel_credentials(authority, key, certificate)
    servers, refused, named = ports(ray, actor), defaultdict[str, set[str]](set), methods() - {STREAM}
    assert len(named) > 100
    for name, port in servers:
        place = f"127.0.0.1:{port}"
        if name.startswith("ray::RuntimeEnv"):
            with pytest.raises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(f"http://{place}/get_or_create_runtime_env", b"")
            with raised.value as error:
                assert error.code == 401
            continue
        for one in strangers:
            for method in (HEALTH, STREAM):
                channel = grpc.insecure_channel(place) if one is None else grpc.secure_channel(place, one)
                assert code(channel, method) == "UNAVAILABLE"
        answers = {method: code(grpc.secure_channel(place, inside), method) for method in named}
        assert set(answers.values()) == {"UNIMPLEMENTED", "UNAUTHENTICATED"}
        for method in [method for method, answer in answers.items() if answer == "UNAUTHENTICATED"]:
            refused[method.split("/")[1]].add(name)
        first = min(method for method, answer in answers.items() if answer == "UNAUTHENTICATED")
        wrong = ("authorization", f"Bearer {'0' * 64}")
        assert code(grpc.secure_channel(place, inside), first, wrong) == "UNAUTHENTICATED"
    assert {name for name, _ in servers} == {"gcs_server", "raylet", "ray::RuntimeEnvAgent", "ray::Role"}
    for service, name in SERVICES.items():
        assert any(one.startswith(name) for one in refused[service]), service
    assert ports(ray, actor) == servers, "none has ended"
