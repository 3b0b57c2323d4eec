"""The process groups of a rank.

- default: all ranks; for ZeRO's collectives if all ranks are HDP ranks;
- rings: all HDP ranks of this rank's hdp group, for batched sends and receives of K,V, dK,dV and expert counts. A ring
  is a list of HDP ranks in this group and needs no separate communicator (ByteScale, communicators);
- with tensor, pipeline or expert parallelism, those of axes.py.

Plan digests, checks and errors go through the agents of the nodes (`control`), not through a process group: gloo would
connect every pair of ranks. The addresses that the groups need to connect also go through the agents (store.py).
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.cluster.gpus import unusable
from engine.cluster.mesh import Mesh
from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.control.control import Control
from engine.errors import PreflightError
from engine.parallel.axes import Axes
from engine.parallel.store import store_of

_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Groups:
    """The process groups, global rank, mesh and device of this process."""

    rank: int
    mesh: Mesh
    device: torch.device
    rings: dist.ProcessGroup
    control: Control
    local_rank: int = 0  # the number of this process on its node
    axes: Axes | None = None  # None if every rank has the whole model

    @property
    def hdp_rank(self) -> int:
        """The HDP rank of this process, which plans and rings use: its position on the hdp axis of the mesh."""
        return self.mesh.place(self.rank).hdp

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor on this rank's device over all HDP ranks and stages, in place, and return it.

        The devices of a tp group have the same values, which count once. The order of the sum is always the same for
        the same ranks and libraries. Collective: all ranks must call it, while no forward or backward pass is running.
        """
        if self.mesh.place(self.rank).tp:
            values.zero_()
        dist.all_reduce(values)
        return values


def join_groups(config: Config, control: Control) -> Groups:
    """Initialise `torch.distributed` and create the process groups. Collective: all ranks must call it.

    `control` is this rank's link to its agent. Reads RANK, WORLD_SIZE and LOCAL_RANK from the environment, which the
    agent sets. Uses NCCL if the config trains on GPUs, else gloo. Raises PreflightError if
    PyTorch cannot use the GPUs, or if one of several ranks has no agent.
    """
    # The config decides, not the machine: a rank without a usable GPU fails instead of training on CPUs unnoticed.
    gpus = uses_gpus(config)
    rank, ranks, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    backend = "nccl" if gpus else "gloo"
    options = None
    if gpus:
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:  # built without CUDA, or for a newer driver
            why = str(error).strip().split("\n")[0].partition(". ")[0]
            raise PreflightError.of([unusable(torch.__version__, why)]) from error
        torch.cuda.set_device(device)
        # At equal priority the GPU schedules the blocks of a running attention kernel first, so that transfers wait.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = _TIMEOUT  # `new_group` warns if it differs from its argument
    # PyTorch's keys go through the agents, so a rank without one could not find the others.
    if control.agent is None and ranks > 1:
        raise PreflightError("this rank has no agent", hint="start ranks with `bytescale train`")
    dist.init_process_group(
        backend,
        timeout=_TIMEOUT,
        store=store_of(control),
        rank=rank,
        world_size=ranks,
        device_id=device if gpus else None,
    )
    mesh = Mesh.of(ranks, config.parallel)

    def new_group(members: list[int], options: Any = None) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            members, _TIMEOUT, backend, pg_options=options, use_local_synchronization=True
        )
        # All members create the communicator here, because only some of them take part in the first batched send.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return group

    # All ranks create their groups in this order: PyTorch names a group of members only by the number of groups that a
    # process has created.
    rings = new_group(mesh.members(rank, "hdp"), options)
    axes = Axes.of(mesh, rank, new_group) if mesh.tp * mesh.pp * mesh.ep > 1 else None
    return Groups(rank, mesh, device, rings, control, local_rank, axes)


def close_listeners() -> None:
    """Close the ports at which the gloo groups of this process wait for members: all of them have connected.

    gloo asks no one who connects for a secret. Not to be called with groups of NCCL, which also connects later; it
    closes connections that do not begin with a random number of the communicator. gloo keeps the numbers of its
    sockets, so each is replaced by one that is not connected, which also ends its watch in gloo's event loop.
    """
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of files that have just been closed
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    with socket.socket(found.family) as unconnected:
                        os.dup2(unconnected.fileno(), int(entry.name), inheritable=False)
