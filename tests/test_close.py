from __future__ import annotations

import math

import pytest
import torch

from engine.close import error, mismatch

ONE = torch.tensor([1.0, -4.0])
CASES = [(ONE, 0.0), (ONE + torch.tensor([0.0, 1.0]), 0.25), (ONE * math.nan, math.inf), (ONE * math.inf, math.inf)]


@pytest.mark.parametrize(("found", "off"), CASES)
def test_error(found: torch.Tensor, off: float) -> None:
    assert error(found, ONE) == off


def test_zeros_are_right_if_both_are_and_infinitely_wrong_if_not() -> None:
    assert error(0 * ONE, 0 * ONE) == 0.0
    assert error(ONE, 0 * ONE) == math.inf
    assert error(ONE * 1e-9, 0 * ONE, least=1.0) == pytest.approx(4e-9)


def test_the_first_mismatch_is_described() -> None:
    assert mismatch([("a", ONE, ONE), ("b", 1.1 * ONE, ONE)], 0.2) is None
    said = mismatch([("a", ONE, ONE), ("b", 1.1 * ONE, ONE)], 0.05)
    assert said == "its b is off by 0.1, relative to the reference's largest element"
    assert mismatch([("a", ONE * math.nan, ONE)], 0.2) == "its a is not finite"
