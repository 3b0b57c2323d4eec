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
from engine.zero import states

MESH = Mesh(hdp=6, tp=2, pp=2)


def opened(folder: Path, mesh: Mesh, place: Place, monkeypatch: pytest.MonkeyPatch) -> tuple[set[float], list[str]]:
    """Resume a rank. Returns the values of its elements, each that of the rank which had it, and the files it opens."""
    files, load = list[str](), states._load

    def counted(path: Path) -> dict[str, Any]:
        files.append(path.name)
        return load(path)

    def lists(*_: Any) -> None:
        raise AssertionError("a folder is listed")

    with monkeypatch.context() as patched:
        patched.setattr(states, "_load", counted)
        patched.setattr(os, "scandir", lists)
        patched.setattr(os, "listdir", lists)
        flat = resume(folder, mesh, place)
    return {*flat.tolist()}, files


@pytest.mark.parametrize("place", [Place(3, 1, 1), Place(5, 0, 1)])
def test_a_rank_of_the_same_mesh_opens_its_own_files(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, MESH, [place.hdp])
    device = place.pp * MESH.tp + place.tp
    own = f"zero_pp_rank_{place.hdp}_mp_rank_{device:02d}_optim_states.pt"
    values, files = opened(tmp_path, MESH, place, monkeypatch)
    assert files == [f"mp_rank_{device:02d}_model_states.pt", own]
    assert values - {0.0} == {float(device * MESH.hdp + place.hdp)}  # 0: the padding


def test_the_last_rank_may_store_no_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed leaves it out in stages 1 and 2."""
    write_checkpoint(tmp_path, MESH, [5])
    path = tmp_path / "zero" / "zero_pp_rank_5_mp_rank_03_optim_states.pt"
    saved = torch.load(path)
    flat, inner = saved["optimizer_state_dict"]["single_partition_of_fp32_groups"], saved["optimizer_state_dict"]
    before, _ = opened(tmp_path, MESH, Place(5, 1, 1), monkeypatch)
    padding = int((resume(tmp_path, MESH, Place(5, 1, 1)) == 0).sum())
    assert padding > 0 and 0.0 in before
    flat[0] = flat[0][:-padding]
    state = inner["base_optimizer_state"]["state"][0]
    state |= {key: value[:-padding] for key, value in state.items() if key != "step"}
    torch.save(saved, path)
    after, files = opened(tmp_path, MESH, Place(5, 1, 1), monkeypatch)
    assert after == before and len(files) == 2


def test_a_rank_of_another_mesh_opens_those_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And rank 0's, for the lengths. Files of no use have a few bytes, which would be an error."""
    write_checkpoint(tmp_path, MESH, [0, 1, 2, 3])
    values, files = opened(tmp_path, Mesh(hdp=3, tp=2, pp=2), Place(1, 1, 1), monkeypatch)
    assert values - {0.0} == {3.0 * MESH.hdp + rank for rank in (1, 2, 3)}  # the parts of 3 ranks have less padding
    assert sorted({*files}) == sorted(
        [
            "mp_rank_03_model_states.pt",
            *(f"zero_pp_rank_{rank}_mp_rank_03_optim_states.pt" for rank in range(4)),
        ]
    )
    assert len(files) == 5


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, MESH, [3])
    (tmp_path / "zero" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError) as raised:
        states.SavedStates(tmp_path, {})
    assert "mp_rank_00_model_states.pt" in str(raised.value)
