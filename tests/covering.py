"""Covering sets: few cases in which any two values of any two factors occur together at least once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def every(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return all cases."""
    return [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[Case]:
    """Return a covering set: always the case that adds the most new pairs, the first of several."""
    cases, chosen = every(factors), []
    left = set().union(*map(_pairs, cases))
    while left:
        chosen.append(max(cases, key=lambda case: len(_pairs(case) & left)))
        left -= _pairs(chosen[-1])
    return chosen


def _pairs(case: Case) -> set[tuple[tuple[str, Any], ...]]:
    return set(combinations(case.items(), 2))
