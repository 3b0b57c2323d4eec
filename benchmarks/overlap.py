"""How much of a device's copies to and from its host hides behind kernels, read from a trace of PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

_HOST = ("DtoH", "HtoD")  # in the name of a copy


class Span(NamedTuple):
    """What a stream of a device does from `start` to `stop`, in any unit of time."""

    stream: int
    start: float
    stop: float


def device_spans(events: Iterable[Mapping[str, Any]]) -> tuple[list[Span], list[Span]]:
    """Return the copies to and from the host, and the kernels, of a trace's events (`traceEvents`)."""
    copies: list[Span] = []
    kernels: list[Span] = []
    for event in events:
        kind = event.get("cat")
        if kind == "kernel" or (kind == "gpu_memcpy" and any(way in event["name"] for way in _HOST)):
            span = Span(int(event["args"]["stream"]), event["ts"], event["ts"] + event["dur"])
            (kernels if kind == "kernel" else copies).append(span)
    return copies, kernels


def hidden_share(copies: Sequence[Span], kernels: Sequence[Span]) -> float:
    """Return the share of the copies' time in which a kernel runs on another stream; 0 without copies."""
    took = sum(copy.stop - copy.start for copy in copies)
    hidden = 0.0
    for stream in {copy.stream for copy in copies}:
        busy = _merged(kernel for kernel in kernels if kernel.stream != stream)
        hidden += sum(_common(copy, busy) for copy in copies if copy.stream == stream)
    return hidden / took if took else 0.0


def _merged(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the times in which any of the spans runs, none of which overlap."""
    merged: list[tuple[float, float]] = []
    for _, start, stop in sorted(spans, key=lambda span: span.start):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def _common(span: Span, times: Iterable[tuple[float, float]]) -> float:
    return sum(max(0.0, min(span.stop, stop) - max(span.start, start)) for start, stop in times)
