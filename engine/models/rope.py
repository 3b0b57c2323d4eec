"""Rotary embedding (Su et al. 2021) and its scalings for long contexts, in float64 until the end.

In float32 the angles are off by 0.1 rad between neighbours at 2M tokens: positions blur. Scalings as the field's
configs mean them: linear (Chen et al. 2023), YaRN (Peng et al. 2023), Llama 3.1's (Grattafiori et al. 2024). Another
base, as in long-context fine-tuning (Xiong et al. 2023), is `model.rope_theta`.
Letters: T tokens, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from engine.config.schema import Model, Rope
from engine.dtypes import wider

Rotation = tuple[Tensor, Tensor]  # cos and sin, [T,1,D]


def rotation(positions: Tensor, shape: Model, dtype: torch.dtype) -> Rotation:
    """Return cos and sin of the rotary angles of integer positions [T], in at least float32, times YaRN's factor."""
    angles = positions.to(torch.float64)[:, None, None] * frequencies(shape, positions.device)  # [T,1,D/2]
    wide, factor = wider(dtype), attention_factor(shape.rope)
    cos, sin = ((part * factor).to(wide) for part in (angles.cos(), angles.sin()))
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def frequencies(shape: Model, device: torch.device | None = None) -> Tensor:
    """Return the angle between neighbouring positions of each pair, rad, float64 [D/2]."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64, device=device) / shape.head_dim
    plain = shape.rope_theta**-exponents
    return _SCALED[shape.rope.kind](plain, shape)


def attention_factor(rope: Rope) -> float:
    """Return what YaRN multiplies cos and sin by (its section 3.4); 1 for the other kinds.

    With `mscale` and `mscale_all_dim` it is DeepSeek's: the ratio of two of them.
    """
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    growth = 0.1 * math.log(_given(rope.factor))
    if rope.mscale is None or rope.mscale_all_dim is None:
        return growth + 1
    return (rope.mscale * growth + 1) / (rope.mscale_all_dim * growth + 1)


def _linear(plain: Tensor, shape: Model) -> Tensor:
    return plain / _given(shape.rope.factor)


def _llama3(plain: Tensor, shape: Model) -> Tensor:
    """Pairs that turn often within the original context stay, those that turn seldom are slowed, others in between."""
    rope = shape.rope
    low, high = _given(rope.low_freq_factor), _given(rope.high_freq_factor)
    turns = plain * _given(rope.original_max_position_embeddings) / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return _mixed(plain, kept, _given(rope.factor))


def _yarn(plain: Tensor, shape: Model) -> Tensor:
    """As Llama 3's, but what stays falls linearly with the number of the pair, between two whole ones."""
    rope = shape.rope
    first = max(math.floor(_pair_that_turns(rope.beta_fast or 32, shape)), 0)
    last = min(math.ceil(_pair_that_turns(rope.beta_slow or 1, shape)), shape.head_dim - 1)
    pairs = torch.arange(len(plain), dtype=torch.float64, device=plain.device)
    kept = 1 - ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
    return _mixed(plain, kept, _given(rope.factor))


def _pair_that_turns(times: float, shape: Model) -> float:
    """Return the number of the pair, a fraction, that turns so often within the original context."""
    longest = _given(shape.rope.original_max_position_embeddings) / (2 * math.pi * times)
    return shape.head_dim * math.log(longest) / (2 * math.log(shape.rope_theta))


def _mixed(plain: Tensor, kept: Tensor, factor: float) -> Tensor:
    return plain * kept + plain / factor * (1 - kept)


def _given(value: float | None) -> float:
    """Return a parameter that `engine/config/checks.py` has found to be there."""
    assert value is not None
    return value


_SCALED: dict[str, Callable[[Tensor, Model], Tensor]] = {
    "none": lambda plain, shape: plain,
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
}
