"""The fraction of a device's copies to and from the host that overlaps with kernels, from a PyTorch profiler trace."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch.profiler import profile

_HOST = ("DtoH", "HtoD")  # one of them is part of the name of each copy


class Span(NamedTuple):
    """One operation on a stream, in any unit of time."""

    stream: int
    start: float
    stop: float


def events_of(profiled: profile) -> list[dict[str, Any]]:
    """Return the events of a finished profile."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return found


def device_spans(events: Iterable[Mapping[str, Any]]) -> tuple[list[Span], list[Span]]:
    """Return the copies to and from the host, and the kernels, among the events of a trace (`traceEvents`)."""
    copies: list[Span] = []
    kernels: list[Span] = []
    for event in events:
        kind = event.get("cat")
        if kind == "kernel" or (kind == "gpu_memcpy" and any(way in event["name"] for way in _HOST)):
            span = Span(int(event["args"]["stream"]), event["ts"], event["ts"] + event["dur"])
            (kernels if kind == "kernel" else copies).append(span)
    return copies, kernels


def hidden_fraction(copies: Sequence[Span], kernels: Sequence[Span]) -> float:
    """Compute the fraction of the copies' time in which a kernel runs on another stream; 0 without copies."""
    duration = sum(copy.stop - copy.start for copy in copies)
    hidden = 0.0
    for stream in {copy.stream for copy in copies}:
        busy = merged(kernel for kernel in kernels if kernel.stream != stream)
        for copy in copies:
            if copy.stream == stream:
                hidden += sum(max(0.0, min(copy.stop, stop) - max(copy.start, start)) for start, stop in busy)
    return hidden / duration if duration else 0.0


def merged(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Join overlapping spans into disjoint intervals."""
    merged: list[tuple[float, float]] = []
    for _, start, stop in sorted(spans, key=lambda span: span.start):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
