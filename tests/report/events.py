"""Checks a trace against the rules of the Trace Event Format (Chromium's document of that name) that ours needs."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

Event = dict[str, Any]
_REQUIRED = {  # of each phase: complete, counter, metadata
    "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "ph", "pid", "tid", "ts", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
}
_METADATA = {"process_name": ("name", str), "thread_name": ("name", str), "thread_sort_index": ("sort_index", int)}
_CLOSE = 1.5e-3  # microseconds: times and durations are rounded to 1 ns


def checked(content: bytes) -> list[Event]:
    """Return the events of a trace. Raises AssertionError if a viewer would refuse or misdraw it."""

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    trace = json.loads(content, parse_constant=refused)
    assert set(trace) == {"displayTimeUnit", "traceEvents"} and trace["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = trace["traceEvents"]
    slices, named = defaultdict[tuple[int, int], list[Event]](list), set[tuple[int, int]]()
    for event in events:
        assert set(event) == _REQUIRED[event["ph"]], event
        assert type(event["pid"]) is int and type(event["tid"]) is int and isinstance(event["name"], str), event
        assert isinstance(event["args"], dict), event
        if event["ph"] == "M":
            key, kind = _METADATA[event["name"]]
            assert set(event["args"]) == {key} and isinstance(event["args"][key], kind), event
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0, event
        if event["ph"] == "C":  # viewers draw a series per argument
            assert event["args"] and all(type(value) in (int, float) for value in event["args"].values()), event
        else:
            assert isinstance(event["dur"], (int, float)) and event["dur"] >= 0 and isinstance(event["cat"], str), event
            slices[event["pid"], event["tid"]].append(event)
    assert set(slices) <= named, "a thread without a name"
    for own in slices.values():
        _check_nesting(own)
    return events


def _check_nesting(slices: list[Event]) -> None:
    """Slices of a thread must be apart or inside each other: viewers show others in wrong rows, or not at all."""
    open_: list[float] = []  # where the slices that contain the next one end
    for event in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        stop = event["ts"] + event["dur"]
        while open_ and open_[-1] <= event["ts"] + _CLOSE:
            open_.pop()
        assert not open_ or stop <= open_[-1] + _CLOSE, event
        open_.append(stop)
