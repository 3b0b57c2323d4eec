"""How far a tensor is from its reference."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor


def error(found: Tensor, reference: Tensor, least: float = 0.0) -> float:
    """Return max|a - b| / max|b|; where b is nothing but rounding, its size is taken for `least`.

    Infinite if there is a NaN: of several errors `max` would pass over one, and every comparison with it would fail.
    """
    a, b = found.detach().double(), reference.detach().double()
    off = float((a - b).abs().max())
    if off == 0.0:
        return off  # also where both are nothing but zeros
    ratio = off / max(float(b.abs().max()), least) if b.any() or least else math.inf
    return math.inf if math.isnan(ratio) else ratio


def too_far(results: Iterable[tuple[str, Tensor, Tensor]], tolerance: float) -> str | None:
    """Return which of several (name, found, reference) is off by more than the tolerance, and by how much, or None."""
    for name, found, reference in results:
        if (off := error(found, reference)) > tolerance:
            how = f"off by {off:.2g} of the largest element" if math.isfinite(off) else "not finite"
            return f"its {name} is {how}"
    return None


def in_a_line(failure: Exception) -> str:
    """Return what an exception says, without the long story of its other lines."""
    return f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
