"""Covering sets: few cases in which any two values of any two factors occur together at least once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = dict[str, Any]


def every(factors: Mapping[str, Sequence[Any]], valid: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Return all valid cases."""
    cases = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return [case for case in cases if valid(case)]


def pairwise(factors: Mapping[str, Sequence[Any]], valid: Callable[[Case], bool] = lambda case: True) -> list[Case]:
    """Return a covering set of the valid cases: always the case that adds the most new pairs, the first of several."""
    cases, chosen = every(factors, valid), []
    pairs = [_pairs(case) for case in cases]
    left = set().union(*pairs)
    while left:
        best = max(range(len(cases)), key=lambda number: len(pairs[number] & left))
        chosen.append(cases[best])
        left -= pairs[best]
    return chosen


def covered(names: str, *values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with all combinations of values, of which those outside a covering set are slow."""
    factors = dict(zip(names.split(", "), values, strict=True))
    few = pairwise(factors)
    cases = (pytest.param(*one.values(), marks=[] if one in few else [pytest.mark.slow]) for one in every(factors))
    return pytest.mark.parametrize(names, list(cases))


def in_turn(names: str, *values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with all combinations of values, of which few have each value once; the others are slow."""
    few = [tuple(row[at % len(row)] for row in values) for at in range(max(map(len, values)))]
    cases = (pytest.param(*one, marks=[] if one in few else [pytest.mark.slow]) for one in product(*values))
    return pytest.mark.parametrize(names.split(", "), list(cases))


def _pairs(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    return set(combinations(case.items(), 2))
