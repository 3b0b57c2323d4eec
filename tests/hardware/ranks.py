"""The groups of a rank in a world of gloo processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from engine.cluster.mesh import Mesh
from engine.parallel.groups import Groups
from tests.world import control


def groups_of_world() -> Groups:
    """Return the groups of this process; rings are in the default group."""
    assert dist.group.WORLD is not None
    mesh = Mesh(dist.get_world_size())
    return Groups(dist.get_rank(), mesh, torch.device("cpu"), dist.group.WORLD, control())
