"""Non-negative least squares for a handful of unknowns, by trying every set of them that may differ from zero."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def fit(terms: Floats, values: Floats, scale: Floats) -> Floats:
    """Return x >= 0, [unknowns], for which sum(((terms @ x - values) / scale)^2) is least.

    terms is [points, unknowns]; values and scale, which is positive, are [points]. The best x is the plain solution on
    its own support (Lawson and Hanson 1974), so the best of all supports is the best x.
    """
    rows, target = terms / scale[:, None], values / scale
    size = np.abs(rows).max(0)
    size[size == 0] = 1.0
    best, least = np.zeros(terms.shape[1]), float((target**2).sum())  # the error of x = 0
    for count in range(1, terms.shape[1] + 1):
        for support in combinations(range(terms.shape[1]), count):
            columns = (rows / size)[:, support]
            found = np.linalg.lstsq(columns, target, rcond=None)[0]
            error = float(((columns @ found - target) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(terms.shape[1]), error
                best[list(support)] = found
    x: Floats = best / size
    return x
