"""Builds what starts the agent of each node, a subprocess here or ssh to another host, and what its ranks run."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.cluster.hosts import is_local
from engine.cluster.nccl import OF_ONE_GPU, needs_order, shares_gpu
from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.control.protocol import RayNode, Work
from engine.job import Job
from engine.launch.agents.environment import forwarded, needed_to_start
from engine.remote.checks import version
from engine.run.folder import RunFolder
from engine.safe_path import safe_path

# Keeps fragmentation on a GPU at the few percent that `estimate-memory` allows for (engine/cost/allowance.py).
ALLOCATORS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
# The same for CPU processes. glibc returns a freed block to the system if it is larger than a threshold, which grows up
# to 32 MiB with the blocks that are freed, unless it is set: then a rank keeps twice the memory of its tensors. Smaller
# blocks it may keep, because to get each from the system again costs a small model a fifth of its time: at the end of
# the heap up to the second limit, and all gaps between blocks in use.
CPU_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
# ssh gives up, and says why, before the launcher does (engine/launch/agents/ranks.py).
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=20", "ServerAliveInterval=5", "ServerAliveCountMax=3")
_SSH = ("ssh", *(word for option in _OPTIONS for word in ("-o", option)))


@dataclass(frozen=True)
class NodeCommand:
    """What starts the agent of a node, and its work.

    On another host, `arguments` are those of ssh, and contain the variables that Python needs to start. `shown` is the
    command without them: values that users set are never printed.
    """

    host: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]  # added to that of the launcher
    work: Work
    shown: tuple[str, ...] = ()

    @property
    def ranks(self) -> list[int]:
        """The ranks of the node."""
        return [rank for rank, _ in self.work.ranks]

    def __str__(self) -> str:
        """The command as a shell would run it, without the variables of the user."""
        set_here = [f"{name}={value}" for name, value in self.environment.items()]
        return shlex.join([*set_here, *(self.shown or self.arguments)])


def node_commands(
    job: Job,
    folder: RunFolder,
    checkpoint: Path | None,
    limit: int | None = None,
    module: tuple[str, ...] | None = None,
    joined_at: str | None = None,
) -> list[NodeCommand]:
    """Build the commands of all nodes of a job, or of the first `limit` nodes.

    Ranks resume from `checkpoint`, or start a new run if it is None; or they run a `module`, given with its arguments.
    Ranks see no GPU if those of the job are CPU processes. All hosts must have the run folder, the data and this
    Python under the same paths. Variables that the user has set are kept, and reach other hosts as
    `environment.forwarded` says; they go over the connection, where `ps` does not show them.

    `joined_at` is the address of this machine if the agents of the other nodes join, with separate environments
    (engine/launch/schedulers/join.py).
    """
    config, cluster = job.config, job.cluster
    addresses = [node.address for node in cluster.nodes[:2]]
    alone = all(is_local(node.host) for node in cluster.nodes)
    folders = [str(folder.root.absolute()), *([str(checkpoint)] if checkpoint else [])]
    program = [sys.executable, "-m", *(module or ("engine.trainer", *folders))]
    shared = _of_all_ranks(cluster.ranks, config)
    users, commands, first = forwarded(os.environ, cluster).variables, [], 0
    agent, start = (sys.executable, "-m", "engine.launch.agents.agent"), secrets.token_hex(8)
    for number, node in enumerate(cluster.nodes[:limit]):
        here = is_local(node.host)
        work = Work(
            folder=str(folder.root.absolute()),
            ranks=[(rank, program) for rank in range(first, first + node.devices)],
            environment=shared if here or joined_at else {**users, **shared},
            gpus=uses_gpus(config),
            alone=alone,
            # From the first host, the route to the second has the interface that others reach.
            peer=joined_at or (None if alone or len(addresses) == 1 else addresses[0 if number else 1]),
            ray=_ray(job, number, start) if config.data.runtime == "ray" else None,
        )
        first += node.devices
        if here or joined_at:
            commands.append(NodeCommand(node.host, agent, safe_path(), work))
            continue
        # ssh does not pass the environment on, so the remote shell sets what Python itself needs.
        arguments = over_ssh(node.host, agent, needed_to_start(users))
        commands.append(NodeCommand(node.host, arguments, {}, work, over_ssh(node.host, agent, {})))
    return commands


def _ray(job: Job, number: int, start: str) -> RayNode:
    """Return what the agent of a node must know of Ray."""
    ray, hosts, first = job.config.data.ray, list[list[int]](), 0
    for node in job.cluster.nodes if number == 0 else ():
        hosts.append(sorted({job.mesh.place(rank).hdp for rank in range(first, first + node.devices)}))
        first += node.devices
    return RayNode(number, version() or "", ray.memory, ray.address, hosts, start)


def _of_all_ranks(ranks: int, config: Config) -> dict[str, str]:
    """Return the variables that all ranks get, on every host."""
    gpus = uses_gpus(config)
    orders = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"} if gpus and needs_order(config) and ranks > 1 else {}
    shared = OF_ONE_GPU if gpus and shares_gpu() else {}
    # PyTorch's newer name for the same variable: with both, it would depend on the version which one counts.
    allocators = {} if "PYTORCH_ALLOC_CONF" in os.environ else ALLOCATORS
    chosen = {**allocators, **orders, **shared, **({} if gpus else CPU_ALLOCATOR)}
    return {
        "WORLD_SIZE": str(ranks),
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),  # DeepSpeed uses a GPU wherever it sees one
        **{name: os.environ.get(name) or value for name, value in chosen.items()},
        **safe_path(),
    }


def over_ssh(host: str, program: Sequence[str], variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command that runs `program` on another host, in this working directory and with these variables."""
    settings = [f"{name}={value}" for name, value in {**variables, **safe_path()}.items()]
    remote = f"cd {shlex.quote(str(Path.cwd()))} && exec env {shlex.join([*settings, *program])}"
    return (*_SSH, host, remote)
