"""Weights that transformers has saved make the same model here."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention.kernels import choose
from engine.attention.layout import whole
from engine.attention.ring import attend
from engine.models.llama.model import Llama
from engine.weights.load import load_weights
from tests.weights.folders import config, llama, logits, saved

TOKENS = torch.randint(0, 258, (41,), generator=torch.Generator().manual_seed(1))


def ours(folder: Path, *overrides: str, dtype: torch.dtype = torch.float32) -> Llama:
    shape = config(*overrides).model
    model = Llama(shape).to(dtype)
    load_weights(model, shape, folder)
    return model


@torch.no_grad()
def our_logits(model: Llama) -> Tensor:
    kernel = choose(torch.device("cpu"), torch.float32, model.shape.head_dim)
    one = partial(attend, layout=whole(len(TOKENS)), comm=None, kernel=kernel)
    return model(TOKENS, torch.arange(len(TOKENS)), one)  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["30KB", "5GB"])
def test_the_same_logits(tmp_path: Path, tied: bool, shard: str) -> None:
    theirs = llama(tie_word_embeddings=tied)
    folder = saved(theirs, tmp_path, shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "30KB")
    found, expected = our_logits(ours(folder, f"model.tied={tied}".lower())), logits(theirs, TOKENS)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_parameters_keep_their_dtype(tmp_path: Path) -> None:
    theirs = llama(torch.bfloat16)
    model = ours(saved(theirs, tmp_path))
    assert model.norm.weight.dtype == torch.float32
    assert torch.equal(model.head.weight, theirs.lm_head.weight.float())
    assert torch.equal(ours(tmp_path, dtype=torch.bfloat16).head.weight, theirs.lm_head.weight)
