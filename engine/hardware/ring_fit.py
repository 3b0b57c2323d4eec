"""The terms of a ring from real micro-batches with rings, all other terms known.

The time of a ring (engine/cost/times.py) is piecewise linear in round_s and 1 / merge_bytes_per_s: a few steps of
Newton's method. Overlap is measured apart: where computing takes longer than the transfers, rings do not show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.config.schema import Config
from engine.cost.calibration import Calibration
from engine.hardware.least_squares import Floats, fit
from engine.hardware.measured import Case, Timing
from engine.hardware.predict import seconds

_NEWTON = 6
_NOTHING = 1e-15  # seconds a byte: where the fit leaves nothing for a rate
_STEPS = (1e-6, 1e-12)  # of round_s and of seconds a merged byte, to see the slope


def link(transfers: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return latency in seconds and bytes/s of messages that travel both ways at once."""
    sizes, times = (np.array(column, dtype=np.float64) for column in zip(*transfers, strict=True))
    latency, a_byte = fit(np.stack([np.ones_like(sizes), sizes], axis=1), times, times).tolist()
    return latency, 1 / max(a_byte, _NOTHING)


def fit_rings(timed: Sequence[tuple[Case, Timing]], known: Calibration, config: Config) -> Calibration:
    """Return the calibration with round_s and merge_bytes_per_s as they give the timed cases back best."""
    cases = [case for case, _ in timed]
    times = np.array([timing.total_s for _, timing in timed])
    x = np.zeros(2)
    for _ in range(_NEWTON):
        here = _predicted(cases, _with(known, x), config)
        slopes = np.stack([_slope(cases, known, x, place, here, config) for place in range(2)], axis=1)
        x = fit(slopes, times - here + slopes @ x, times)
    return _with(known, x)


def _slope(cases: Sequence[Case], known: Calibration, x: Floats, place: int, here: Floats, config: Config) -> Floats:
    moved = x.copy()
    moved[place] += _STEPS[place]
    slope: Floats = (_predicted(cases, _with(known, moved), config) - here) / _STEPS[place]
    return slope


def _with(known: Calibration, x: Floats) -> Calibration:
    return replace(known, round_s=float(x[0]), merge_bytes_per_s=1 / max(float(x[1]), _NOTHING))


def _predicted(cases: Sequence[Case], calibration: Calibration, config: Config) -> Floats:
    return np.array([seconds(case, calibration, config) for case in cases])
