from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from engine.config.load import load
from engine.config.schema import Model
from engine.cost.flops import attention, attention_flops, linear_flops, pairs, products
from engine.family.families import unnamed
from engine.job import Job
from tests.presets import LLAMA7B_256K


def linear_weights(model: Model) -> int:
    return sum(products(model).values())


def shape(**changes: object) -> Model:
    return load([]).model.model_copy(update=changes)


def test_llama_7b_with_8_key_heads_by_hand() -> None:
    model = load(LLAMA7B_256K).model
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 11008
    assert linear_weights(model) == 32 * layer + 4096 * 32000
    assert products(model) == {
        "projection": 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024),
        "ffn": 32 * 3 * 4096 * 11008,
        "expert": 0,
        "head": 4096 * 32000,
    }
    assert linear_flops(model) == 2 * linear_weights(model)
    assert attention_flops(attention(model), 1) == 4 * 4096 * 32
    step = Job(load(LLAMA7B_256K)).costs.flops(np.array([10, 3], dtype=np.int64))
    assert step == 3 * (13 * linear_flops(model) + (55 + 6) * attention_flops(attention(model), 1))


@given(st.integers(0, 60), st.integers(1, 70))
def test_pairs_of_queries_one_by_one(tokens: int, window: int) -> None:
    assert pairs(tokens) == sum(position + 1 for position in range(tokens))
    assert pairs(tokens, window) == sum(min(position + 1, window) for position in range(tokens))


def test_of_experts_those_that_a_token_meets_count_and_the_router() -> None:
    dense, sparse = shape(), shape(family="mixtral", experts=8, top_k=2)
    more = dense.layers * dense.hidden * (3 * dense.ffn + 8)
    assert linear_weights(sparse) == linear_weights(dense) + more


@pytest.mark.parametrize(("kv_heads", "experts", "top_k"), [(2, 1, 1), (4, 1, 1), (2, 8, 2)])
def test_linear_layers_against_pytorchs_own_count(kv_heads: int, experts: int, top_k: int) -> None:
    """Forward and backward of the real model, attention left out; the first layer's input needs its gradient too."""
    from engine.models.build import build_model
    from engine.models.common.attention import LocalAttention

    class Unchanged(LocalAttention):
        def __call__(self, q: Any, k: Any, v: Any) -> Any:
            return q

    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": kv_heads, "ffn": 96, "vocab": 300}
    model_shape = shape(**sizes, family=unnamed(experts), experts=experts, top_k=top_k)
    tokens = 50
    model = build_model(load([]).model_copy(update={"model": model_shape}))
    with FlopCounterMode(display=False) as counted:
        positions = torch.arange(tokens)
        logits = model(torch.zeros(tokens, dtype=torch.long), positions, attention=Unchanged(positions))
        logits.sum().backward()
    unused = 4 * 2 * 2 * 64 * (64 // 4 * kv_heads) * tokens  # k and v get no gradient here: 4 operations a weight
    assert counted.get_total_flops() == 6 * linear_weights(model_shape) * tokens - unused
