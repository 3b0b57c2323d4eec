"""Weights are drawn block by block, so that a process draws only what it stores."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.models.common import initialise as initialising
from engine.models.common.initialise import Stored, initialise, whole
from engine.models.decoder import Decoder
from tests.models.shapes import LLAMA


def weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = Decoder(LLAMA["gqa"]).to(dtype)
    initialise(model, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_matrices_are_normal_and_norms_are_one() -> None:
    for name, weight in weights(0).items():
        if "norm" in name:
            assert bool((weight == 1).all())
        else:
            assert abs(float(weight.mean())) < 4 * 0.02 / weight.numel() ** 0.5
            assert float(weight.std()) == pytest.approx(0.02, rel=4 / weight.numel() ** 0.5)


def test_a_seed_gives_the_same_weights_again_and_another_gives_others() -> None:
    first, again, other = weights(0), weights(0), weights(1)
    for name in first:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], other[name]) == ("norm" in name)


def test_parameters_and_blocks_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialising, "BLOCK", 100)
    drawn = torch.cat([weight.flatten() for name, weight in weights(0).items() if "norm" not in name])
    assert len(drawn.unique()) > 0.99 * len(drawn)


def test_bf16_weights_are_rounded_float32_weights() -> None:
    narrow = weights(0, torch.bfloat16)
    for name, weight in weights(0).items():
        assert torch.equal(weight.bfloat16(), narrow[name])


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
@pytest.mark.parametrize("block", [16, 1000, 1 << 20])
def test_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch, processes: int, block: int) -> None:
    """Shards of any number of processes, padded at the end, as ZeRO-3 makes them."""
    monkeypatch.setattr(initialising, "BLOCK", block)
    model, size, shape = nn.Linear(37, 29, bias=False), 37 * 29, torch.Size((29, 37))
    initialise(model, 5)
    expected, each = whole(model.weight).values.detach().clone(), -(-size // processes)
    model.weight.data.zero_()
    flat = model.weight.data.view(-1)
    for process in range(processes):
        mine = slice(process * each, min(size, (process + 1) * each))
        initialise(model, 5, stored=lambda _, mine=mine: Stored(flat[mine], mine.start, shape))
    assert torch.equal(flat, expected)
