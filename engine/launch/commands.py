"""Builds the command that starts each rank: a subprocess on this machine, ssh to other hosts, one rendezvous."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.cluster.cluster import Cluster
from engine.cluster.hosts import is_local
from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.launch.environment import forwarded
from engine.run.folder import RunFolder
from engine.safe_path import safe_path

# Keeps fragmentation on a GPU at the few percent that `estimate-memory` allows for (engine/cost/allowance.py).
ALLOCATORS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

# Processes in which a rank compiles kernels. PyTorch starts up to 32 in each rank, with 300 MB of host memory each.
COMPILE_WORKERS = 4


@dataclass(frozen=True)
class RankCommand:
    """The command that starts one rank as a subprocess; `environment` is added to the inherited environment.

    On another host, the subprocess is ssh: `arguments` contain the rank's variables, and `environment` is empty. Then
    `shown` is the command without the variables that are forwarded from here: values that users set are never printed.
    """

    rank: int
    host: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    shown: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The command as a shell would run it, without forwarded variables."""
        return shlex.join([*(f"{k}={v}" for k, v in self.environment.items()), *(self.shown or self.arguments)])


def rank_commands(
    cluster: Cluster,
    folder: RunFolder,
    checkpoint: Path | None,
    port: int,
    config: Config,
    limit: int | None = None,
    module: tuple[str, ...] | None = None,
) -> list[RankCommand]:
    """Build the commands that start all ranks, or the first `limit` ranks.

    Ranks resume from `checkpoint`, or start a new run if it is None; or they run a `module`, given with its arguments.
    `port` is the port of their rendezvous. Ranks see no GPU if those of `config` are CPU processes. All hosts must have
    the run folder, the data and this Python under the same paths. Variables that the user has set are kept, and reach
    other hosts as `environment.forwarded` says.
    """
    gpus = uses_gpus(config)
    hosts = [node.host for node in cluster.nodes]
    folders = [str(folder.root.absolute()), *([str(checkpoint)] if checkpoint else [])]
    program = (sys.executable, "-m", *(module or ("engine.trainer", *folders)))
    # ZeRO-3 gathers weights while rings exchange K,V: two communicators with kernels in flight on one GPU. All ranks
    # post them in the same order, and only with this variable NCCL keeps that order on the device (NVIDIA/nccl#522).
    orders = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"} if gpus and config.zero.stage == 3 and cluster.ranks > 1 else {}
    chosen = {**ALLOCATORS, **orders}
    shared = {
        "WORLD_SIZE": str(cluster.ranks),
        "MASTER_ADDR": "127.0.0.1" if all(map(is_local, hosts)) else hosts[0],
        "MASTER_PORT": str(port),
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),  # DeepSpeed uses a GPU wherever it sees one
        **{name: os.environ.get(name) or value for name, value in chosen.items()},
        **safe_path(),
    }
    users = forwarded(os.environ, cluster).variables
    commands = []
    for rank in range(cluster.ranks)[:limit]:
        node, local = cluster.place(rank)
        threads = max((os.cpu_count() or 1) // cluster.nodes[node].devices, 1)
        environment = {"RANK": str(rank), "LOCAL_RANK": str(local), **shared}
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(threads)
        workers = str(min(threads, COMPILE_WORKERS))
        environment["TORCHINDUCTOR_COMPILE_THREADS"] = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS") or workers
        if is_local(hosts[node]):
            commands.append(RankCommand(rank, hosts[node], program, environment))
            continue
        # ssh does not pass the environment on, so the remote shell sets it.
        over_ssh = [
            ("ssh", "-o", "BatchMode=yes", hosts[node], _remote(variables, program))
            for variables in ({**users, **environment}, environment)
        ]
        commands.append(RankCommand(rank, hosts[node], over_ssh[0], {}, over_ssh[1]))
    return commands


def _remote(variables: Mapping[str, str], program: Sequence[str]) -> str:
    """The shell command that runs `program` on another host, in this working directory and with these variables."""
    settings = [f"{name}={value}" for name, value in variables.items()]
    return f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*settings, *program])}"


def free_port() -> int:
    """Find a TCP port that is free now; another process may still take it before the ranks do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
