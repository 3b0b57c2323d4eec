"""How far a tensor is from its reference."""

from __future__ import annotations

import math

from torch import Tensor


def error(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """Return max|a - b| / max|b|; where b is nothing but rounding, its size is taken for `least`.

    Infinite if there is a NaN: of several errors `max` would pass over one, and every comparison with it would fail.
    """
    a, b = a.detach().double(), b.detach().double()
    found = float((a - b).abs().max() / b.abs().max().clamp(min=least))
    return math.inf if math.isnan(found) else found
