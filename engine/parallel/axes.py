"""The place of a rank in a mesh with tensor, pipeline or expert parallelism, and its process groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from engine.cluster.mesh import Group, Mesh, Place


def everyone() -> dist.ProcessGroup:
    """The default group, of all ranks. `torch.distributed` must be initialised."""
    group = dist.group.WORLD
    assert group is not None
    return group


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
    tied: dist.ProcessGroup | None  # the first and the last stage, if they share a tied weight; None on other stages

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        rank: int,
        tied: bool,
        made: Mapping[Group, dist.ProcessGroup],
        alone: Callable[[], dist.ProcessGroup],
    ) -> Axes:
        """Select the groups of global rank `rank`; `tied`: whether embedding and head are one weight.

        `made` are the groups that `communicators` lists (engine/cluster/communicators.py). A group of all ranks that is
        not among them is the default group, and `alone` creates one of this rank only.
        """
        place = mesh.place(rank)

        def group(kind: Group) -> dist.ProcessGroup:
            if kind in made:
                return made[kind]
            members = len(mesh.members(rank, kind))
            assert members in (1, mesh.ranks)
            return alone() if members == 1 else everyone()

        tp, pp = group("tp"), group("pp")
        shares = tied and mesh.pp > 1 and place.pp in (0, mesh.pp - 1)
        return cls(
            mesh,
            place,
            group("hdp"),
            tp,
            pp,
            tp if mesh.pp == 1 else pp if mesh.tp == 1 else group("model"),
            group("ep") if mesh.ep > 1 else None,
            group("experts") if mesh.ep > 1 else None,
            (pp if mesh.pp == 2 else group("tied")) if shares else None,
        )

    @property
    def first(self) -> bool:
        """Whether this rank is on the stage with the embedding."""
        return self.place.pp == 0

    @property
    def last(self) -> bool:
        """Whether this rank is on the stage with the head."""
        return self.place.pp == self.mesh.pp - 1
