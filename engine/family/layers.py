"""Kinds of layers, and the list of those of a model in order of depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LayerKind:
    """Consecutive layers that are alike: what their cost and their parameters depend on."""

    count: int
    window: int | None  # tokens that a query attends to, itself included; None: all before it
    experts: bool  # a router and experts in place of one SwiGLU


def merged(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Merge equal kinds at any depth, for sums over layers. The order is that of their first layers."""
    counts: dict[LayerKind, int] = {}
    for kind in kinds:
        alike = replace(kind, count=1)
        counts[alike] = counts.get(alike, 0) + kind.count
    return tuple(replace(kind, count=count) for kind, count in counts.items())


def part(kinds: Sequence[LayerKind], numbers: range) -> tuple[LayerKind, ...]:
    """Return the kinds of some consecutive layers, such as those of a pipeline stage."""
    found, first = [], 0
    for kind in kinds:
        stop = first + kind.count
        if (count := min(stop, numbers.stop) - max(first, numbers.start)) > 0:
            found.append(replace(kind, count=count))
        first = stop
    return tuple(found)
