"""The process groups of a rank along the axes of a mesh.

Groups are created by their members only: with all ranks, creating them would take a time that grows with the world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from engine.cluster.mesh import Mesh, Place

NewGroup = Callable[[list[int]], dist.ProcessGroup]


@dataclass(frozen=True)
class Axes:
    """The place of this rank in a mesh, and its groups."""

    mesh: Mesh
    place: Place
    hdp: dist.ProcessGroup  # ranks with the same part of the model: ZeRO shards its states over them
    tp: dist.ProcessGroup  # ranks that split the matrices of a stage
    pp: dist.ProcessGroup  # the stages of a pipeline
    model: dist.ProcessGroup  # ranks that have the whole model together, tp x pp of them
    ep: dist.ProcessGroup | None  # ranks that share the experts of each layer; None without expert parallelism
    experts: dist.ProcessGroup | None  # ranks that store the same experts; None without expert parallelism
    tied: dist.ProcessGroup | None  # the first and the last stage, which share a tied weight; None on other stages

    @classmethod
    def of(cls, mesh: Mesh, rank: int, new_group: NewGroup) -> Axes:
        """Create the groups of global rank `rank`. `new_group` creates a group of global ranks, by its members only."""
        place, stages = mesh.place(rank), mesh.members(rank, "pp")
        on_an_end = mesh.pp > 1 and place.pp in (0, mesh.pp - 1)
        return cls(
            mesh,
            place,
            new_group(mesh.members(rank, "hdp")),
            new_group(mesh.members(rank, "tp")),
            new_group(stages),
            new_group(mesh.members(rank, "model")),
            new_group(mesh.members(rank, "ep")) if mesh.ep > 1 else None,
            new_group(mesh.members(rank, "experts")) if mesh.ep > 1 else None,
            # Last: PyTorch names a group after how many its members have created, and inner stages do not create it.
            new_group([stages[0], stages[-1]]) if on_an_end else None,
        )

    @property
    def first(self) -> bool:
        """Whether this rank is on the stage with the embedding."""
        return self.place.pp == 0

    @property
    def last(self) -> bool:
        """Whether this rank is on the stage with the head."""
        return self.place.pp == self.mesh.pp - 1
