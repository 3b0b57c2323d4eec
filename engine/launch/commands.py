"""From a cluster to the commands that start its ranks: subprocesses here, ssh elsewhere, one rendezvous."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.cluster.cluster import Cluster
from engine.safe_path import safe_path
from engine.trainer.folder import RunFolder

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# So that a rank holds what `estimate-memory` says: on a GPU gaps of a few percent, on a CPU no freed memory kept for
# later, which with the C library's own moving threshold was half of the tensors (for 5 % of the processor's time).
ALLOCATORS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}


@dataclass(frozen=True)
class RankCommand:
    """How one rank is started: `arguments` in a process of ours, with `environment` added to what it inherits."""

    rank: int
    host: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def __str__(self) -> str:
        """Return the command as a shell would take it."""
        return shlex.join([*(f"{k}={v}" for k, v in self.environment.items()), *self.arguments])


def rank_commands(
    cluster: Cluster, folder: RunFolder, checkpoint: Path | None, port: int, most: int | None = None
) -> list[RankCommand]:
    """Return a command for each rank, or for the first so many.

    All hosts must see the run folder and the data under the same path.
    """
    arguments = [str(folder.root.absolute()), *([str(checkpoint)] if checkpoint else [])]
    program = (sys.executable, "-m", "engine.trainer", *arguments)
    return [_command(cluster, rank, program, port) for rank in range(cluster.ranks)[:most]]


def is_local(host: str) -> bool:
    """Return whether a host of a hostfile is this machine."""
    return is_loopback(host) or host == socket.gethostname()


def is_loopback(host: str) -> bool:
    """Return whether a name means this machine to whoever uses it, wherever that is."""
    return host in _LOOPBACK


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _command(cluster: Cluster, rank: int, program: tuple[str, ...], port: int) -> RankCommand:
    node, local = cluster.place(rank)
    host = cluster.nodes[node].host
    alone = all(is_local(other.host) for other in cluster.nodes)
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(cluster.ranks),
        "MASTER_ADDR": "127.0.0.1" if alone else cluster.nodes[0].host,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or _threads(cluster.nodes[node].slots),
        **safe_path(),
    } | {name: os.environ.get(name) or value for name, value in ALLOCATORS.items()}
    if is_local(host):
        return RankCommand(rank, host, program, environment)
    settings = [f"{name}={value}" for name, value in environment.items()]
    remote = f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*settings, *program])}"
    return RankCommand(rank, host, ("ssh", "-o", "BatchMode=yes", host, remote), {})


def _threads(slots: int) -> str:
    return str(max((os.cpu_count() or 1) // slots, 1))
