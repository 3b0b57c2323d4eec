"""Saves a checkpoint of an engine, as a run does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.cluster.mesh import Mesh
from engine.errors import CheckpointError
from engine.run.checkpoints import Parts, Range, Share, TrainState, _hash, write, write_manifest
from engine.zero.engine import ZeroEngine
from engine.zero.part import Encoded, read
from engine.zero.snapshot import Snapshot
from engine.zero.states import _Files
from tests.run.damage import TOKEN, make_format
from tests.world import Named

NODE = 2  # ranks; the last node of an odd world has one


class OfNodes(Named):
    """Exchanges of a rank of a world, as if it were one of several nodes."""

    def share(self, name: str, value: Any) -> dict[int, Any]:
        found, node = super().share(name, value), dist.get_rank() // NODE
        return {rank: value for rank, value in found.items() if rank // NODE == node}


def save(engine: ZeroEngine, folder: Path) -> None:
    """Save the states into `folder`, which may exist. All ranks must call it."""
    save_taken(engine.snapshot(copies=False), folder, engine._axes.mesh if engine._axes else None)


def save_taken(taken: Snapshot, folder: Path, mesh: Mesh | None = None) -> list[Range]:
    """Save a snapshot of a mesh, by default of one axis. Returns the ranges of this rank. All ranks must call it."""
    mesh, ranges = mesh or Mesh(dist.get_world_size()), list[Range]()

    def write_each(draft: Path, share: Share) -> Iterator[Range]:
        for one in taken.write_each(draft, share):
            ranges.append(one)
            yield one

    state = TrainState(1, {}, mesh.ranks, {}, {}, mesh={"tp": mesh.tp, "pp": mesh.pp})
    around = folder / "written"
    written = write(around, state, dist.get_rank(), write_each, TOKEN, OfNodes(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        for path in list(written.iterdir()):
            path.rename(folder / path.name)
        written.rmdir()
        around.rmdir()
    dist.barrier()
    return ranges


def states_of(folder: Path, rank: int) -> dict[str, Any]:
    """Return the states of a rank, of any classes, by the names of DeepSpeed's files."""
    name, start, stop = Parts(folder).of(rank)
    return read(folder / name, start, stop, lambda file: torch.load(file, weights_only=False))


def change_part(folder: Path, rank: int, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Let `change` change the states of a rank, in a checkpoint with its hashes. Returns the file that has them."""
    parts, of_ranks, files = Parts(folder), [], defaultdict[str, bytes](bytes)
    for one in range(parts.state.ranks):
        name, states = parts.of(one).file, states_of(folder, one)
        if one == rank:
            change(states)
        begin = len(files[name])
        files[name] += b"".join(Encoded(states).pieces())
        of_ranks.append([(Range(name, begin, len(files[name])), ["0" * 32])])
    for name, content in files.items():
        (folder / name).unlink()  # what is mapped stays as it was
        (folder / name).write_bytes(content)
    write_manifest(folder, parts.state, of_ranks)
    return folder / parts.of(rank).file


def take_apart(folder: Path, number: int = 3) -> None:
    """Rewrite a checkpoint in format 2 or 3, in which each file of DeepSpeed is a file."""
    files, state, of_ranks = _Files(folder), Parts(folder).state, []
    tp, pp = (state.mesh or {}).values()
    mesh = Mesh(state.ranks // (tp * pp), tp, pp)
    for place in map(mesh.place, range(state.ranks)):
        found = []
        try:
            part = files._part(place.hdp, place.pp * tp + place.tp)
        except CheckpointError:  # one without states, of benchmarks/resume_at_scale.py
            part = {}
        for name, states in part.items():
            torch.save(states, folder / name)
            size = (folder / name).stat().st_size
            found.append((Range(name, 0, size), [_hash(folder / name, 0, size)]))
        of_ranks.append(found)
    for path in folder.glob("zero/*.states"):
        path.unlink()
    write_manifest(folder, state, of_ranks)
    make_format(folder, number)
