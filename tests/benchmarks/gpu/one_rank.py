"""A world of one rank, as the GPU benchmarks create it."""

from __future__ import annotations

import torch

from engine.cluster.mesh import Mesh
from engine.control.control import Control
from engine.parallel.groups import Groups


def alone() -> Groups:
    """Return the groups of this process, which is alone in its world."""
    return Groups(0, Mesh(1), torch.device("cpu"), torch.distributed.group.WORLD, Control(0))
