"""A share that is wrong here would call copies hidden that hold the computing up."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu.overlap import Span, device_spans, hidden_fraction


def kernels(*times: tuple[float, float], stream: int = 7) -> list[Span]:
    return [Span(stream, *pair) for pair in times]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], 0.0),
        (kernels((0, 10), (20, 30)), 0.0),  # before and after
        (kernels((0, 40)), 1.0),
        (kernels((5, 15)), 0.5),
        (kernels((10, 12), (12, 14), (18, 25)), 0.6),
        (kernels((10, 16), (12, 14), (11, 18)), 0.8),  # at once: counted once
        (kernels((10, 15), stream=8) + kernels((12, 17)), 0.7),
        (kernels((10, 20), stream=1), 0.0),  # the copy's own stream
    ],
)
def test_a_copy_hides_where_kernels_of_other_streams_run(others: list[Span], expected: float) -> None:
    assert hidden_fraction([Span(1, 10, 20)], others) == pytest.approx(expected)


def test_copies_count_by_their_time() -> None:
    copies = [Span(1, 0, 30), Span(2, 100, 110)]
    assert hidden_fraction(copies, kernels((0, 30))) == pytest.approx(0.75)
    assert hidden_fraction(copies, kernels((0, 30), stream=2)) == pytest.approx(0.75), (
        "another stream's, though it copies"
    )
    assert hidden_fraction([], kernels((0, 30))) == 0.0


def event(kind: str, name: str, start: float, stream: int | None) -> dict[str, Any]:
    arguments = {} if stream is None else {"stream": stream}
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": 2.5, "args": arguments}


def test_spans_of_a_trace() -> None:
    """Copies on the device are no traffic with the host, and a CPU's operations no kernels."""
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        event("cpu_op", "aten::mm", 0, None),
        event("cuda_runtime", "cudaMemcpyAsync", 0, None),
        event("kernel", "sm90_xmma_gemm_bf16", 1, 7),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 2, 20),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 3, 24),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 4, 24),
        event("gpu_memset", "Memset (Device)", 5, 7),
    ]
    copies, found = device_spans(events)
    assert copies == [Span(20, 2, 4.5), Span(24, 4, 6.5)] and found == [Span(7, 1, 3.5)]
