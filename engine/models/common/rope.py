"""Rotary embedding (Su et al. 2021) and its scalings for long contexts, computed in float64 and cast at the end.

In float32 the angle between adjacent positions has an error of 0.1 rad at position 2M. The scalings are those of
Hugging Face's `rope_scaling`: linear (Chen et al. 2023), YaRN (Peng et al. 2023) and Llama 3.1's (Grattafiori et al.
2024). To use a larger base (Xiong et al. 2023), set `model.rope_theta`.

Letters: T tokens, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.config.schema import Model, Rope
from engine.dtypes import wider

Rotation = tuple[Tensor, Tensor]  # cos and sin, [T,1,D]


def rotary_embedding(positions: Tensor, shape: Model, dtype: torch.dtype) -> Rotation:
    """Compute cos and sin of the rotary angles of integer positions [T]: two tensors [T,1,D].

    Their dtype is float64 if `dtype` is, else float32. They are multiplied by YaRN's factor (`attention_factor`).
    """
    angles = positions.to(torch.float64)[:, None, None] * frequencies(shape, positions.device)  # [T,1,D/2]
    wide, factor = wider(dtype), attention_factor(shape.rope)
    cos, sin = ((part * factor).to(wide) for part in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def frequencies(shape: Model, device: torch.device | None = None) -> Tensor:
    """Compute the rotation in rad per position of each pair of dimensions: float64 [D/2].

    Linear scaling divides all frequencies by `rope.factor`. YaRN and Llama 3 keep the frequency of pairs that rotate
    many times within the original context, divide the frequency of pairs that rotate few times by `rope.factor`, and
    interpolate between the two.
    """
    rope = shape.rope
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64, device=device) / shape.head_dim
    plain = shape.rope_theta**-exponents
    if rope.kind == "none":
        return plain
    divided = plain / _given(rope.factor)
    if rope.kind == "linear":
        return divided
    if rope.kind == "yarn":  # interpolates linearly in the index of the pair, between two integers
        first = max(math.floor(_pair_that_turns(rope.beta_fast or 32, shape)), 0)
        last = min(math.ceil(_pair_that_turns(rope.beta_slow or 1, shape)), shape.head_dim - 1)
        pairs = torch.arange(len(plain), dtype=torch.float64, device=plain.device)
        kept = 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
    else:  # Llama 3 interpolates linearly in the number of rotations within the original context
        low, high = _given(rope.low_freq_factor), _given(rope.high_freq_factor)
        turns = plain * _given(rope.original_max_position_embeddings) / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * kept + divided * (1 - kept)


def attention_factor(rope: Rope) -> float:
    """Return the factor by which YaRN multiplies cos and sin (Peng et al. 2023, section 3.4); 1 for other scalings.

    An explicit `rope.attention_factor` is returned unchanged. With `mscale` and `mscale_all_dim`, the factor is a ratio
    of two such factors, as in DeepSeek's models.
    """
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    growth = 0.1 * math.log(_given(rope.factor))
    if rope.mscale is None or rope.mscale_all_dim is None:
        return growth + 1
    return (rope.mscale * growth + 1) / (rope.mscale_all_dim * growth + 1)


def _pair_that_turns(times: float, shape: Model) -> float:
    """Return the (fractional) index of the pair that rotates `times` times within the original context."""
    longest = _given(shape.rope.original_max_position_embeddings) / (2 * math.pi * times)
    return shape.head_dim * math.log(longest) / (2 * math.log(shape.rope_theta))


def _given(value: float | None) -> float:
    """Return `value` as a float; `engine/config/checks.py` ensures that it is not None."""
    assert value is not None
    return value
