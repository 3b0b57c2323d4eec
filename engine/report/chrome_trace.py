"""Timelines in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

A plan, a simulated planner or a run is a process of the trace, and each of its ranks a thread. A micro-batch is a slice
of its rank; the wait for transfers is a slice inside it, drawn at its end as on pages. Times are in microseconds.
Format: "Trace Event Format", of the Chromium project.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.planner.plan.loads import micro_tokens
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.report.boxes import Span, largest_rings, shown_ranks, simulated_spans
from engine.report.run import RunData
from engine.report.words import short_tokens
from engine.simulator.timeline import simulate
from engine.units import NS

Event = dict[str, Any]
MOST_RANKS = 1024  # of a plan; viewers get slow with more
_COUNTERS = ("loss", "tokens_per_s", "grad_norm", "lr", "balance", "mfu", "unsplit", "peak_memory")
_WAITS = {"plan_wait_s": "waits for the plan", "data_wait_s": "waits for data"}
# Threads: one with a slice per step, and the ranks from 2 on. Thread 0 is the idle thread of the kernel in Perfetto.
_STEPS, _FIRST_RANK = 1, 2


@dataclass(frozen=True, eq=False)
class Timed:
    """A step on ranks: its plan, and the times of micro-batches in seconds from the start of the step."""

    number: int
    plan: StepPlan
    spans: Sequence[Span]
    step_s: float


@dataclass(frozen=True, eq=False)
class Process:
    """A process of the trace: steps one after the other, or a run with one of its steps in detail."""

    name: str
    steps: Sequence[Timed] = ()
    run: RunData | None = None


def simulated_steps(plans: Iterable[StepPlan], settings: PlanSettings) -> list[Timed]:
    """Simulate plans of a config, on at most MOST_RANKS ranks, evenly spaced from the first to the last."""
    found = list[Timed]()
    for number, plan in enumerate(plans, start=1):
        line, ranks = simulate(plan, settings), shown_ranks(plan.ranks, MOST_RANKS)
        step_s = settings.costs.seconds(line.step_ns(settings.costs))
        found.append(Timed(number, plan, simulated_spans(plan, settings, line, ranks), step_s))
    return found


def chrome_trace(processes: Sequence[Process]) -> bytes:
    """Write processes as one JSON file."""
    events = [event for pid, process in enumerate(processes, start=1) for event in _events(process, pid)]
    text = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{text}\n]}}\n'.encode()


def _events(process: Process, pid: int) -> Iterator[Event]:
    yield _named("process_name", pid, _STEPS, process.name)
    yield _named("thread_name", pid, _STEPS, "steps")
    threads, start = set[tuple[int, str]](), 0
    for step in process.steps:
        yield _slice(f"step {step.number}", "step", pid, _STEPS, start, start + _ns(step.step_s))
        yield from _of_ranks(step, pid, start)
        threads |= {_thread(step.plan, span) for span in step.spans}
        start += _ns(step.step_s)
    if process.run is not None:
        yield from _of_run(process.run, pid)
        if (trace := process.run.trace) is not None:
            threads |= {_thread(trace.plan, span) for span in trace.spans}
    for thread, name in sorted(threads):
        yield _named("thread_name", pid, thread, name)
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": thread, "args": {"sort_index": thread}}


def _thread(plan: StepPlan, span: Span) -> tuple[int, str]:
    """The thread of a span, and its name: there is one for each rank, and in a pipeline for each rank of each stage."""
    name = f"stage {span.stage}, rank {span.rank}" if plan.stages > 1 else f"rank {span.rank}"
    return _FIRST_RANK + span.stage * plan.ranks + span.rank, name


def _of_run(run: RunData, pid: int) -> Iterator[Event]:
    """Yield the steps of a run one after the other, metrics as counters, and the step that was measured."""
    start = 0
    for line in run.lines:
        stop = start + _ns(line.get("step_s") or 0.0)
        facts = {name: line[name] for name in ("tokens", "max_degree") if name in line}
        yield _slice(f"step {line['step']}", "step", pid, _STEPS, start, stop, facts)
        inner = start
        for name, text in _WAITS.items():
            waited = min(stop - inner, _ns(line.get(name) or 0.0))
            if waited:
                yield _slice(text, "wait", pid, _STEPS, inner, inner + waited)
            inner += waited
        if run.trace is not None and line["step"] == run.trace.step:
            yield from _of_ranks(Timed(run.trace.step, run.trace.plan, run.trace.spans, 0.0), pid, start)
        for name in _COUNTERS:
            value = line.get(name)
            if value is not None and np.isfinite(value):
                counted = {name: value}
                yield {"ph": "C", "name": name, "pid": pid, "tid": _STEPS, "ts": start / 1000, "args": counted}
        start = stop


def _of_ranks(step: Timed, pid: int, start: int) -> Iterator[Event]:
    """Yield the micro-batches of a step that begins at `start` ns."""
    plan = step.plan
    degrees, tokens = largest_rings(plan).tolist(), micro_tokens(plan).tolist()
    for span in step.spans:
        micro = span.micro_batch
        degree, size = degrees[micro], short_tokens(tokens[micro])
        kind = "idle" if degree == 0 else "unsplit" if degree == 1 else f"ring of {degree}"
        facts = {
            "step": step.number,
            "micro_batch": micro - int(plan.micro_start[span.rank]),
            "tokens": tokens[micro],
            "gang": int(plan.gang[micro]),
            "offload": int(plan.offload[micro]) / 1e6,
        }
        if plan.mode == "lockstep":
            facts["slot"] = int(plan.slot[micro])
        begin, stop = start + _ns(span.start_s), start + _ns(span.stop_s)
        name, (thread, _) = kind if degree == 0 else f"{kind}, {size} tokens", _thread(plan, span)
        yield _slice(name, kind, pid, thread, begin, stop, facts)
        if waited := min(stop - begin, _ns(span.exposed_s)):
            yield _slice("waits for transfers", "wait", pid, thread, stop - waited, stop)


def _slice(name: str, kind: str, pid: int, tid: int, start: int, stop: int, facts: Event | None = None) -> Event:
    """A complete event, from `start` to `stop` ns."""
    event = {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid}
    return event | {"ts": start / 1000, "dur": (stop - start) / 1000, "args": facts or {}}


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _ns(seconds: float) -> int:
    """Whole nanoseconds, so that the ends of a slice and of the one inside it are equal."""
    return round(seconds * NS)
