"""The three process groups of a rank.

- the world: ZeRO's reductions;
- rings: K,V and dK,dV, sent in batched groups only;
- control: gloo, for plans, hashes and guards, used by the training thread alone.

Rings have a communicator of their own over all ranks, so that no ring needs a new group (ByteScale, communicators).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Groups:
    """The groups of this rank, and where it computes."""

    rank: int
    world: int
    device: torch.device
    rings: dist.ProcessGroup
    control: dist.ProcessGroup


def join_groups() -> Groups:
    """Join the rendezvous that the launcher's environment names, and build the groups.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Uses NCCL where this rank has a CUDA device.
    """
    local = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=_TIMEOUT, device_id=device if cuda else None)
    rings = dist.new_group(backend=backend, timeout=_TIMEOUT)
    control = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    dist.all_reduce(torch.zeros(1, device=device), group=rings)  # builds the communicator before the first ring
    return Groups(dist.get_rank(), dist.get_world_size(), device, rings, control)
