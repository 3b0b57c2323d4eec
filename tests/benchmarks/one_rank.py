"""The one rank of a world of one, as benchmarks of a GPU join it there."""

from __future__ import annotations

import torch

from engine.trainer.groups import Groups


def alone() -> Groups:
    """Return the groups of this process, which is alone in its world."""
    world = torch.distributed.group.WORLD
    return Groups(0, 1, torch.device("cpu"), world, world)
