"""A rank opens the files of a checkpoint that it needs, and lists no folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.resume_at_scale import resume, write_checkpoint
from engine.cluster.mesh import Mesh, Place
from engine.errors import CheckpointError
from engine.run.checkpoints import FILES, Parts
from engine.zero import states
from tests.zero.saving import take_apart

MESH = Mesh(hdp=6, tp=2, pp=2)
NODE = 5  # ranks, of which the last node has 4


def file_of(rank: int) -> str:
    """The name of the file of a rank's node."""
    first = rank - rank % NODE
    return f"zero/ranks-{first:05d}-{min(first + NODE, MESH.ranks) - 1:05d}.states"


def opened(folder: Path, mesh: Mesh, place: Place, monkeypatch: pytest.MonkeyPatch) -> tuple[set[float], list[str]]:
    """Resume a rank. Returns the values of its elements, each that of the rank which had it, and the files it opens."""
    files, load, read = list[str](), states._load, states.read

    def loads(file: Any, path: Path) -> dict[str, Any]:
        if isinstance(file, Path):
            files.append(path.name)
        return load(file, path)

    def reads(path: Path, start: int, *given: Any) -> dict[str, Any]:
        files.append(f"{path.relative_to(folder)} {start}")
        return read(path, start, *given)

    def lists(*_: Any) -> None:
        raise AssertionError("a folder is listed")

    with monkeypatch.context() as patched:
        patched.setattr(states, "_load", loads)
        patched.setattr(states, "read", reads)
        patched.setattr(os, "scandir", lists)
        patched.setattr(os, "listdir", lists)
        flat = resume(folder, mesh, place)
    return {*flat.tolist()}, files


def parts_of(folder: Path, places: list[Place]) -> list[str]:
    """The parts of ranks, as `opened` returns them."""
    ranks = [MESH.rank(place) for place in places]
    return [f"{file_of(rank)} {Parts(folder).of(rank).start}" for rank in ranks]


@pytest.mark.parametrize("place", [Place(3, 1, 1), Place(5, 0, 1)])
def test_a_rank_of_the_same_mesh_reads_its_own_part(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the first part of its device, which has the model states. Other parts have no states: an error."""
    write_checkpoint(tmp_path, MESH, [place.hdp], NODE)
    device = place.pp * MESH.tp + place.tp
    values, files = opened(tmp_path, MESH, place, monkeypatch)
    assert files == parts_of(tmp_path, [Place(0, place.tp, place.pp), place])
    assert values - {0.0} == {float(device * MESH.hdp + place.hdp)}  # 0: the padding


def test_the_last_rank_may_store_no_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed leaves it out in stages 1 and 2. A checkpoint of format 3."""
    write_checkpoint(tmp_path, MESH, [5], NODE)
    before, _ = opened(tmp_path, MESH, Place(5, 1, 1), monkeypatch)
    padding = int((resume(tmp_path, MESH, Place(5, 1, 1)) == 0).sum())
    assert padding > 0 and 0.0 in before
    take_apart(tmp_path)
    path = tmp_path / "zero" / "zero_pp_rank_5_mp_rank_03_optim_states.pt"
    saved = torch.load(path)
    flat, inner = saved["optimizer_state_dict"]["single_partition_of_fp32_groups"], saved["optimizer_state_dict"]
    flat[0] = flat[0][:-padding]
    state = inner["base_optimizer_state"]["state"][0]
    state |= {key: value[:-padding] for key, value in state.items() if key != "step"}
    torch.save(saved, path)
    after, files = opened(tmp_path, MESH, Place(5, 1, 1), monkeypatch)
    assert after == before and files == ["mp_rank_03_model_states.pt", path.name]


def test_a_rank_of_another_mesh_reads_the_parts_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And rank 0's, for the lengths. Parts of no use have no states, which would be an error."""
    write_checkpoint(tmp_path, MESH, [0, 1, 2, 3], NODE)
    values, files = opened(tmp_path, Mesh(hdp=3, tp=2, pp=2), Place(1, 1, 1), monkeypatch)
    assert values - {0.0} == {3.0 * MESH.hdp + rank for rank in (1, 2, 3)}  # the parts of 3 ranks have less padding
    assert sorted(files) == sorted(parts_of(tmp_path, [Place(rank, 1, 1) for rank in range(4)]))


@pytest.mark.parametrize("number", [2, 3])
def test_a_checkpoint_with_files_of_each_rank_is_read_by_names(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, MESH, [0, 1, 2, 3], NODE)
    before, _ = opened(tmp_path, Mesh(hdp=3, tp=2, pp=2), Place(1, 1, 1), monkeypatch)
    take_apart(tmp_path, number)
    after, files = opened(tmp_path, Mesh(hdp=3, tp=2, pp=2), Place(1, 1, 1), monkeypatch)
    assert after == before
    assert sorted(files) == sorted(
        [
            "mp_rank_03_model_states.pt",
            *(f"zero_pp_rank_{rank}_mp_rank_03_optim_states.pt" for rank in range(4)),
        ]
    )
    (tmp_path / "zero" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError) as raised:
        states.SavedStates(tmp_path, {})
    assert "mp_rank_00_model_states.pt" in str(raised.value)


def test_among_many_nodes_a_rank_reads_few_pages_of_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(hdp=240, tp=2)
    write_checkpoint(tmp_path, mesh, [0, 200], NODE)
    assert len((tmp_path / FILES).read_bytes().splitlines()) == 8
    asked, read_page = list[int](), states.Parts.of.__globals__["_read_page"]
    monkeypatch.setitem(
        states.Parts.of.__globals__,
        "_read_page",
        lambda folder, head, number, offset: asked.append(number) or read_page(folder, head, number, offset),
    )
    assert {*resume(tmp_path, mesh, Place(200, 1)).tolist()} - {0.0} == {240.0 + 200}
    assert asked == [0, 6]


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The manifest may be that of another checkpoint, or a file be cut after it was verified."""
    write_checkpoint(tmp_path, MESH, [3], NODE)
    (tmp_path / file_of(0)).write_bytes(b"none")
    with pytest.raises(CheckpointError) as raised:
        states.SavedStates(tmp_path, {})
    assert file_of(0) in str(raised.value.problems[0].key) and "rank 0" in str(raised.value)
    (tmp_path / file_of(0)).unlink()
    with pytest.raises(FileNotFoundError):
        states.SavedStates(tmp_path, {})
    with pytest.raises(CheckpointError, match="no part of rank 24"):
        Parts(tmp_path).of(24)
