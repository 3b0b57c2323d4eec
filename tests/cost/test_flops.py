from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from engine.config.load import load
from engine.config.schema import Model
from engine.cost.flops import UNIT, attention_units, linear_units, linear_weights


def shape(**changes: object) -> Model:
    return load([]).model.model_copy(update=changes)


def test_llama_7b_with_8_key_heads_by_hand() -> None:
    model = load(["recipe=llama7b-256k"]).model
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 11008
    assert linear_weights(model) == 32 * layer + 4096 * 32000
    assert linear_units(model) == pytest.approx(6 * linear_weights(model) / UNIT, abs=1)
    assert attention_units(model) == pytest.approx(12 * 4096 * 32 / UNIT, abs=1)


def test_nothing_is_free() -> None:
    tiny = shape(layers=1, hidden=2, heads=1, kv_heads=1, ffn=1, vocab=1)
    assert linear_units(tiny) >= 1 and attention_units(tiny) >= 1


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_linear_layers_against_pytorchs_own_count(kv_heads: int) -> None:
    """Forward and backward of the real model, attention left out; the first layer's input needs its gradient too."""
    from engine.models.llama.model import Llama

    model_shape = shape(layers=2, hidden=64, heads=4, kv_heads=kv_heads, ffn=96, vocab=300)
    tokens = 50
    model = Llama(model_shape)
    with FlopCounterMode(display=False) as counted:
        logits = model(torch.zeros(tokens, dtype=torch.long), torch.arange(tokens), lambda q, k, v: q)
        logits.sum().backward()
    unused = 4 * 2 * 2 * 64 * (64 // 4 * kv_heads) * tokens  # k and v get no gradient here: 4 operations a weight
    assert counted.get_total_flops() == 6 * linear_weights(model_shape) * tokens - unused
