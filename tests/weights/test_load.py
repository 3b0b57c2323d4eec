"""Weights saved by transformers give the same logits here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from engine.cluster.mesh import Mesh
from engine.config.load import load
from engine.errors import DataError
from engine.family.families import parameters_of
from engine.models.build import build_model
from engine.trainer.model import part_of
from engine.weights.check import check_weights
from engine.weights.copy import import_weights
from engine.weights.load import load_weights
from tests.slices import slice_of
from tests.weights.folders import config, llama, logits, mixtral, our_logits, saved

TOKENS = torch.randint(0, 258, (41,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["30KB", "5GB"])
def test_the_same_logits(tmp_path: Path, tied: bool, shard: str) -> None:
    theirs = llama(tie_word_embeddings=tied)
    folder = saved(theirs, tmp_path, shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "30KB")
    found, expected = our_logits(config(f"model.tied={tied}".lower()), folder, TOKENS), logits(theirs, TOKENS)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


SCALED = {
    "linear": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0},
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


@pytest.mark.parametrize("kind", sorted(SCALED))
def test_rotary_scalings_are_imported(tmp_path: Path, kind: str) -> None:
    theirs = llama(rope_parameters={"rope_type": kind, "rope_theta": 5e5, **SCALED[kind]}, max_position_embeddings=64)
    same_by_import(theirs, saved(theirs, tmp_path))


def test_experts_are_stacked(tmp_path: Path) -> None:
    theirs = mixtral()
    same_by_import(theirs, saved(theirs, tmp_path, "20KB"))


def same_by_import(theirs: PreTrainedModel, folder: Path) -> None:
    """The overrides that an import prints give a model with the same logits."""
    found = import_weights(folder, None)
    imported = load(found["overrides"])
    assert check_weights(folder, imported) == []
    ours, expected = our_logits(imported, folder, TOKENS), logits(theirs, TOKENS)
    assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    """Also in one expert of a stacked parameter, and where only the cast to the run's dtype overflows."""
    theirs = mixtral()
    with torch.no_grad():
        theirs.model.layers[1].mlp.experts.down_proj[7, -1, -1] = float("nan")
        theirs.model.norm.weight[0] = 3.4e38
    folder = saved(theirs, tmp_path)
    expert = "model.layers.1.block_sparse_moe.experts.7.w2.weight"
    model = build_model(load(import_weights(saved(mixtral(), tmp_path / "sound"), None)["overrides"]))
    for dtype, names in ((torch.float32, expert), (torch.bfloat16, f"{expert}, model.norm.weight")):
        with pytest.raises(DataError) as caught:
            load_weights(model.to(dtype), model.shape, folder)
        assert str(caught.value) == f"NaN or infinity in {names}"
        assert caught.value.problems[0].key == str(folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("experts", [True, False])
def test_a_device_reads_only_its_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, experts: bool
) -> None:
    """Under tp 2 and pp 2, with a vocabulary that tp does not divide."""
    shape = {"vocab_size": 259, "tie_word_embeddings": tied}
    theirs = mixtral(**shape) if experts else llama(**shape)
    folder = saved(theirs, tmp_path, "20KB")
    overrides = import_weights(folder, None)["overrides"]
    settings = load([*overrides, "parallel.tp=2", "parallel.pp=2", "cluster.ranks_per_node=8"])
    mesh, whole = Mesh.of(8, settings.parallel), build_model(settings)
    load_weights(whole, settings.model, folder)
    expected = dict(whole.named_parameters())
    if tied:
        expected["head.weight"] = expected["embedding.weight"]
    read: list[Tensor] = []

    class Slice:
        def __init__(self, stored: Any) -> None:
            self._stored, self.get_shape = stored, stored.get_shape

        def __getitem__(self, index: Any) -> Tensor:
            read.append(self._stored[index])
            return read[-1]

    @contextmanager
    def noted(path: Path, framework: str) -> Iterator[Any]:
        with safe_open(path, framework) as file:
            yield SimpleNamespace(get_slice=lambda name: Slice(file.get_slice(name)))

    monkeypatch.setattr("engine.weights.load.safe_open", noted)
    for place in map(mesh.place, range(mesh.ranks)):
        model, table, needed = build_model(settings, part_of(settings, place)), parameters_of(settings.model), 0
        load_weights(model, settings.model, folder)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, slice_of(table[name], expected[name], mesh.tp, place.tp)), name
            # What pads the vocabulary is in no file: one row of the last slice.
            pads = name in ("embedding.weight", "head.weight") and place.tp == mesh.tp - 1
            needed += parameter.nbytes - (settings.model.hidden * parameter.itemsize if pads else 0)
        assert sum(part.nbytes for part in read) == needed, place
        read.clear()


def test_parameters_keep_their_dtype(tmp_path: Path) -> None:
    theirs = llama(torch.bfloat16)
    folder = saved(theirs, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(config()).to(dtype)
        load_weights(model, model.shape, folder)
        assert torch.equal(model.head.weight, theirs.lm_head.weight.to(dtype))
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
