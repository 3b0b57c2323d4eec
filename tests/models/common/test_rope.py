"""Rotary angles: those of Hugging Face where they are right, and exact where theirs are not."""

from __future__ import annotations

import math
from functools import partial

import mpmath
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.close import error
from engine.config.schema import Model, Rope
from engine.models.common.pointwise import ROTATE
from engine.models.common.rope import attention_factor, frequencies, rotary_embedding
from tests.models.huggingface import theirs_of, without_float32_casts
from tests.models.rounding import nearly_all_rounded_once
from tests.models.shapes import ROPES, rope

ANY = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)


def shape(rope: Rope = ROPES["none"], head_dim: int = 128, theta: float = 5e5) -> Model:
    """Return a model of two heads."""
    size = {
        "layers": 1,
        "hidden": 2 * head_dim,
        "heads": 2,
        "kv_heads": 1,
        "ffn": 8,
        "experts": 1,
        "top_k": 1,
        "head_size": None,
        "window": None,
        "windowed": (True,),
    }
    return Model(
        **size,
        name="x",
        family="llama",
        norm_top_k=True,
        vocab=9,
        rope_theta=theta,
        rope=rope,
        norm_eps=1e-5,
        tied=False,
    )


def theirs(model: Model, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return Hugging Face's cos and sin of positions [T], [T,1,D] each."""
    cos, sin = LlamaRotaryEmbedding(theirs_of(model))(torch.zeros(1, dtype=dtype), positions[None])
    return cos[0, :, None], sin[0, :, None]


def between(by: tuple[Tensor, Tensor]) -> Tensor:
    """Return the angles between the first two positions, rad, float64 [D/2], from -pi to pi."""
    (cos, next_cos), (sin, next_sin) = (part[:2, 0].double().chunk(2, dim=-1)[0] for part in by)
    return torch.atan2(next_sin * cos - next_cos * sin, next_cos * cos + next_sin * sin)


@ANY
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 5e5), (64, 1e4), (8, 1e6)])
def test_frequencies_are_huggingfaces_to_rounding(rope: Rope, head_dim: int, theta: float) -> None:
    """Their own code run in float64 gives ours to the last digits; as it is, in float32, to its rounding."""
    model = shape(rope, head_dim, theta)
    found, single = frequencies(model), LlamaRotaryEmbedding(theirs_of(model))
    with without_float32_casts():
        double = LlamaRotaryEmbedding(theirs_of(model))
    torch.testing.assert_close(found, double.inv_freq, rtol=1e-13, atol=0)
    torch.testing.assert_close(found, single.inv_freq.double(), rtol=2e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(single.attention_scaling, rel=1e-14)


@ANY
def test_cos_and_sin_are_huggingfaces_up_to_8k(rope: Rope) -> None:
    """As they are, their angles are off by up to 8,192 x 2^-24 and some: rounded frequencies and rounded products."""
    model, positions = shape(rope), torch.arange(8192)
    assert max(map(error, rotary_embedding(positions, model, torch.float32), theirs(model, positions))) < 1e-3
    with without_float32_casts():
        exact = theirs(model, positions, torch.float64)
    assert max(map(error, rotary_embedding(positions, model, torch.float64), exact)) < 1e-11


@ANY
@pytest.mark.parametrize("start", [0, 1 << 20, (1 << 21) - 2, 2_000_003])
def test_neighbours_are_told_apart_far_out(rope: Rope, start: int) -> None:
    model = shape(rope)
    found = between(rotary_embedding(torch.tensor([start, start + 1]), model, torch.float32))
    assert (found - frequencies(model)).abs().max() < 1e-6, "rad"


def test_huggingfaces_neighbours_blur_at_2m() -> None:
    """Why angles are float64: theirs are products of float32."""
    model, positions = shape(), torch.tensor([(1 << 21) - 2, (1 << 21) - 1])
    off = (between(theirs(model, positions)) - frequencies(model)).abs().max().item()
    assert 0.05 < off < 0.3, "rad"


@pytest.mark.parametrize("theta", [1e4, 5e5])
@pytest.mark.parametrize("position", [0, 1, 1 << 20, (1 << 21) - 2, 2_000_003])
def test_cos_and_sin_are_exact_far_out(position: int, theta: float) -> None:
    size = 16
    cos, sin = rotary_embedding(torch.tensor([position]), shape(head_dim=size, theta=theta), torch.float32)
    with mpmath.workdps(50):
        for pair in range(size // 2):
            angle = position * mpmath.mpf(theta) ** (-mpmath.mpf(2 * pair) / size)
            for column in (pair, pair + size // 2):
                assert abs(cos[0, 0, column].item() - mpmath.cos(angle)) < 1e-7
                assert abs(sin[0, 0, column].item() - mpmath.sin(angle)) < 1e-7


def test_linear_scaling_is_that_of_positions() -> None:
    """Eight positions of a model scaled by eight are one of the model before."""
    scaled = rotary_embedding(torch.arange(0, 8 * 512, 8), shape(rope("linear", factor=8.0)), torch.float64)
    plain = rotary_embedding(torch.arange(512), shape(), torch.float64)
    assert max(map(error, scaled, plain)) < 1e-12


@pytest.mark.parametrize("name", ["llama3", "yarn"])
def test_fast_pairs_stay_and_slow_ones_are_slowed_by_the_factor(name: str) -> None:
    ratio = frequencies(shape()) / frequencies(shape(ROPES[name]))
    factor = ROPES[name].factor
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(factor)
    assert (ratio.diff() >= 0).all() and ((ratio > 1.01) & (ratio < factor - 0.01)).sum() > 5, "and between"


def test_attention_factors() -> None:
    """YaRN's sqrt(1/t) = 0.1 ln(s) + 1; DeepSeek's is a ratio of two; one that is given wins."""
    assert attention_factor(ROPES["yarn"]) == 0.1 * math.log(16) + 1
    assert attention_factor(ROPES["yarn, DeepSeek's"]) == (0.1 * math.log(40) + 1) / (0.07 * math.log(40) + 1)
    assert attention_factor(ROPES["yarn, own factor"]) == 1.3
    assert [attention_factor(ROPES[name]) for name in ("none", "linear", "llama3")] == [1, 1, 1]


def test_only_the_distance_of_two_tokens_counts() -> None:
    q, k = torch.randn(2, 1, 1, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def scores(start: int) -> Tensor:
        by = rotary_embedding(torch.arange(start, start + 512), shape(), torch.float64)
        return ROTATE(q.expand(512, 1, 128), *by)[:, 0] @ ROTATE(k.expand(512, 1, 128), *by)[:, 0].T

    assert error(scores(2_000_000), scores(0)) < 1e-8


def test_bf16_is_rotated_in_float32_and_rounded_once() -> None:
    """With cos and sin in bf16 the error of q.k was 1.5 to 2 times as large."""
    x = torch.randn(256, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    by = partial(rotary_embedding, torch.arange(2_000_000, 2_000_256), shape(head_dim=64))
    assert nearly_all_rounded_once(ROTATE(x, *by(torch.bfloat16)), ROTATE(x.double(), *by(torch.float64)))
