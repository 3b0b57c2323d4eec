"""A share that is wrong here would call copies hidden that hold the computing up."""

from __future__ import annotations

import pytest

from benchmarks.gpu.overlap import Span, hidden_fraction


def kernels(*times: tuple[float, float], stream: int = 7) -> list[Span]:
    return [Span(stream, *pair) for pair in times]


CASES: list[tuple[list[Span], float]] = [
    ([], 0.0),
    (kernels((0, 10), (20, 30)), 0.0),  # before and after
    (kernels((0, 40)), 1.0),
    (kernels((5, 15)), 0.5),
    (kernels((10, 12), (12, 14), (18, 25)), 0.6),
    (kernels((10, 16), (12, 14), (11, 18)), 0.8),  # at once: counted once
    (kernels((10, 15), stream=8) + kernels((12, 17)), 0.7),
    (kernels((10, 20), stream=1), 0.0),  # the copy's own stream
]


def test_a_copy_hides_where_kernels_of_other_streams_run() -> None:
    for others, expected in CASES:
        assert hidden_fraction([Span(1, 10, 20)], others) == pytest.approx(expected)
