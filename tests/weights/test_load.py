"""Weights that transformers has saved make the same model here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.models.build import build_model
from engine.weights.load import load_weights
from tests.weights.folders import config, llama, logits, our_logits, saved

TOKENS = torch.randint(0, 258, (41,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["30KB", "5GB"])
def test_the_same_logits(tmp_path: Path, tied: bool, shard: str) -> None:
    theirs = llama(tie_word_embeddings=tied)
    folder = saved(theirs, tmp_path, shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "30KB")
    found, expected = our_logits(config(f"model.tied={tied}".lower()), folder, TOKENS), logits(theirs, TOKENS)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_parameters_keep_their_dtype(tmp_path: Path) -> None:
    theirs = llama(torch.bfloat16)
    folder = saved(theirs, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        model = build_model(config()).to(dtype)
        load_weights(model, model.shape, folder)
        assert torch.equal(model.head.weight, theirs.lm_head.weight.to(dtype))
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
