"""The process groups of a rank.

- default: all ranks; for ZeRO's collectives if all ranks are HDP ranks;
- rings: all HDP ranks of this rank's hdp group, for batched sends and receives of K,V, dK,dV and expert counts. A ring
  is a list of HDP ranks in this group and needs no separate communicator (ByteScale, communicators);
- with tensor, pipeline or expert parallelism, those of axes.py.

`engine/cluster/communicators.py` lists which of them have a communicator.

Plan digests, checks and errors go through the agents of the nodes (`control`), not through a process group: gloo would
connect every pair of ranks. The addresses that the groups need to connect also go through the agents (store.py).
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.cluster.communicators import Communicator, communicators
from engine.cluster.gpus import unusable
from engine.cluster.mesh import Mesh
from engine.cluster.nccl import nccl_problem, shares_gpu
from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.control.control import Control
from engine.errors import PreflightError
from engine.parallel.alone import alone
from engine.parallel.axes import Axes, everyone
from engine.parallel.store import store_of

_log = logging.getLogger(__name__)
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
    PyTorch cannot use the GPUs, if NCCL is too old, or if one of several ranks has no agent.
    """
    # The config decides, not the machine: a rank without a usable GPU fails instead of training on CPUs unnoticed.
    gpus = uses_gpus(config)
    rank, ranks, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cuda", 0 if shares_gpu() else local_rank) if gpus else torch.device("cpu")
    if gpus:
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:  # built without CUDA, or for a newer driver
            why = str(error).strip().split("\n")[0].partition(". ")[0]
            raise PreflightError.of([unusable(torch.__version__, why)]) from error
        torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(device.index)  # by which DeepSpeed selects it
        # The one that is loaded, which need not be that of the PyTorch: LD_PRELOAD can replace it.
        version, host = torch.cuda.nccl.version(), socket.gethostname()
        _log.info("NCCL %s on %s, %s", ".".join(map(str, version)), host, device)
        if problem := nccl_problem(config, ranks, version, host):
            raise PreflightError.of([problem])
    # PyTorch's keys go through the agents, so a rank without one could not find the others.
    if control.agent is None and ranks > 1:
        raise PreflightError("this rank has no agent", hint="start ranks with `bytescale train`")
    connect(device, store_of(control), rank, ranks)
    return create_groups(config, control, device, local_rank)


def connect(device: torch.device, store: Any, rank: int, ranks: int) -> None:
    """Initialise `torch.distributed`. Collective: all ranks must call it."""
    gpus = device.type == "cuda"
    dist.init_process_group(
        "nccl" if gpus else "gloo",
        timeout=_TIMEOUT,
        store=store,
        rank=rank,
        world_size=ranks,
        device_id=device if gpus else None,
        # ZeRO-3 gathers the weights of the next layers from it while this layer is computed.
        pg_options=_options(urgent=True) if gpus else None,
    )


def create_groups(config: Config, control: Control, device: torch.device, local_rank: int) -> Groups:
    """Create the process groups of this rank beside the default one. Collective: all ranks must call it."""
    rank, ranks, gpus = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    mesh, tied = Mesh.of(ranks, config.parallel), config.model.tied

    def new_group(one: Communicator) -> dist.ProcessGroup:
        members = mesh.members(rank, one.group)
        if len(members) == 1:  # a stage inside a pipeline, of the kind `tied`
            if gpus:
                # The others split the default communicator, which takes all ranks, also those that get nothing.
                nccl: Any = everyone()._get_backend(device)
                nccl.perform_nocolor_split(device)
            return alone()
        options = _options(one.urgent, one.sms) if gpus else None
        group: dist.ProcessGroup = dist.new_group(members, _TIMEOUT, pg_options=options, use_local_synchronization=True)
        # All members create the communicator here, because only some of them take part in the first batched send.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return group

    # In the same order on all ranks: PyTorch also names a group of members only by the number of groups that a process
    # has.
    made = {one.group: new_group(one) for one in communicators(mesh, tied)}
    # No rank has a ring without others.
    rings = made.get("rings") or (everyone() if ranks == 1 else alone())
    axes = Axes.of(mesh, rank, tied, made, alone) if mesh.tp * mesh.pp * mesh.ep > 1 else None
    return Groups(rank, mesh, device, rings, control, local_rank, axes)


def _options(urgent: bool, sms: int | None = None) -> Any:
    """NCCL's options of a group. Each needs an object of its own, because PyTorch writes the group's ranks into it."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    options._timeout = _TIMEOUT  # PyTorch warns if it differs from the argument of `new_group`
    if sms is not None:
        options.config.max_ctas = sms
    return options


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
