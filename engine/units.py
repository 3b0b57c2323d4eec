"""Array types and units that packages share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

PPM = 1_000_000  # offload ratios are parts per million, because plans hold integers only
NS = 1e9  # nanoseconds in a second
