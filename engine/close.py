"""The distance between a tensor and its reference."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor


def error(found: Tensor, reference: Tensor, least: float = 0.0) -> float:
    """Return the relative error max|found - reference| / max|reference|; 0 if both are equal.

    `least` is a lower bound for the denominator, for a reference that is zero up to rounding. With `least` 0, the error
    against an all-zero reference is infinite unless both are equal. It is also infinite, not NaN, if an element is NaN:
    `max` over several errors could lose a NaN, and every comparison with NaN is false.
    """
    a, b = found.detach().double(), reference.detach().double()
    off = float((a - b).abs().max())
    if off == 0.0:
        return off  # also where both are all zeros
    ratio = off / max(float(b.abs().max()), least) if b.any() or least else math.inf
    return math.inf if math.isnan(ratio) else ratio


def mismatch(results: Iterable[tuple[str, Tensor, Tensor]], tolerance: float) -> str | None:
    """Describe the first (name, found, reference) whose relative error exceeds `tolerance`; None if there is none."""
    for name, found, reference in results:
        if (off := error(found, reference)) > tolerance:
            how = f"off by {off:.2g}, relative to the reference's largest element" if off < math.inf else "not finite"
            return f"its {name} is {how}"
    return None
