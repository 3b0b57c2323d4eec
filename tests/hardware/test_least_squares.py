from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.hardware.least_squares import Floats, fit


def drawn(seed: int, points: int, unknowns: int) -> tuple[Floats, Floats]:
    generator = np.random.default_rng(seed)
    return generator.random((points, unknowns)) + 0.01, generator.random(points) + 0.1


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_what_is_exact_is_found(seed: int, unknowns: int) -> None:
    terms, _ = drawn(seed, 12, unknowns)
    x = np.random.default_rng(seed + 1).random(unknowns) + 0.1
    times = terms @ x
    assert fit(terms, times, times) == pytest.approx(x, rel=1e-6)


@given(st.integers(0, 10**6), st.integers(1, 5))
def test_no_feasible_step_makes_the_error_less(seed: int, unknowns: int) -> None:
    """The Kuhn-Tucker conditions: the slope is zero where x is positive, and not downwards where it is zero."""
    terms, values = drawn(seed, 9, unknowns)
    x = fit(terms, values, values)
    rows = terms / values[:, None]
    slope = rows.T @ (rows @ x - 1)
    assert (x >= 0).all()
    assert np.abs(slope[x > 0]).max(initial=0) < 1e-6 * np.abs(rows).max()
    assert slope[x == 0].min(initial=0) > -1e-6 * np.abs(rows).max()


def test_a_cost_is_never_negative() -> None:
    terms = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    times = np.array([1.0, 2.2, 3.4])  # a plain fit goes through -0.2
    assert np.linalg.lstsq(terms, times, rcond=None)[0][1] < 0
    slope, fixed = fit(terms, times, times)
    assert fixed == 0
    assert slope > 1


def test_errors_are_relative_to_the_scale() -> None:
    """Without it the longest micro-batch alone would decide."""
    terms, values = np.array([[1.0], [1000.0]]), np.array([2.0, 1000.0])
    assert fit(terms, values, np.ones(2))[0] == pytest.approx(1.0, abs=1e-3)
    assert fit(terms, values, values)[0] == pytest.approx(1.2, abs=1e-3)


def test_units_do_not_matter() -> None:
    terms, values = drawn(7, 10, 3)
    units = np.array([1e-12, 1.0, 1e9])
    assert fit(terms * units, values, values) * units == pytest.approx(fit(terms, values, values), rel=1e-6)


def test_a_term_that_no_point_has_is_zero() -> None:
    terms = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert fit(terms, np.array([3.0, 6.0]), np.ones(2)).tolist() == pytest.approx([3.0, 0.0])
