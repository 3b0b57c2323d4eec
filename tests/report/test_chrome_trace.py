"""Traces of plans, simulations and runs are valid, and have the times of the simulator and of the metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.planner.plan.loads import micro_tokens
from engine.report import chrome_trace as module
from engine.report.chrome_trace import Process, chrome_trace, simulated_steps
from engine.report.run import read_run
from engine.simulator.timeline import simulate
from tests.planner import samples
from tests.report.events import checked
from tests.report.runs import metrics, plan, spans, write_run
from tests.report.samples import slow_links

Event = dict[str, Any]


def slices(events: list[Event], *kinds: str) -> list[Event]:
    return [one for one in events if one["ph"] == "X" and (not kinds or one["cat"] in kinds)]


@pytest.mark.parametrize(("mode", "ranks"), [("free", 4), ("lockstep", 3), ("pipeline", 4), ("free", 1)])
def test_the_slices_of_a_plan_are_those_of_the_simulator(mode: str, ranks: int) -> None:
    settings = slow_links(ranks, mode)
    plans = [plan(ranks, mode=mode, settings=settings), plan(ranks, 3 * ranks, mode, settings)]
    events = checked(chrome_trace([Process("adaptive", simulated_steps(plans, settings))]))
    steps = slices(events, "step")
    assert [one["name"] for one in steps] == ["step 1", "step 2"]
    assert steps[1]["ts"] == steps[0]["dur"] > 0
    micro = [one for one in slices(events) if one["cat"] not in ("step", "wait")]
    passes = 2 if mode == "pipeline" else 1
    assert len(micro) == passes * sum(one.micro_batches for one in plans)
    assert sum(one["args"]["tokens"] for one in micro) == passes * sum(int(micro_tokens(one).sum()) for one in plans)
    line = simulate(plans[0], settings)
    first = [one for one in micro if one["args"]["step"] == 1]
    assert max(one["ts"] + one["dur"] for one in first) <= line.makespan / 1000 + 1e-3
    assert min(one["ts"] for one in first) == 0
    assert {one["tid"] for one in micro} == set(range(2, ranks + 2))
    assert ("slot" in micro[0]["args"]) == (mode == "lockstep")
    if ranks > 1:
        assert slices(events, "wait"), "slow links are waited for"
        assert any(one["name"].startswith("ring of 2") for one in micro)


def test_ranks_have_names_in_their_order() -> None:
    settings = samples.settings(ranks=3)
    events = checked(
        chrome_trace([Process(name, simulated_steps([plan(3)], settings)) for name in ("static", "naive")])
    )
    names = [(one["pid"], one["name"], one["args"]) for one in events if one["ph"] == "M"]
    assert (1, "process_name", {"name": "static"}) in names and (2, "process_name", {"name": "naive"}) in names
    assert (2, "thread_name", {"name": "rank 2"}) in names and (1, "thread_sort_index", {"sort_index": 2}) in names


def test_a_large_cluster_shows_some_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RANKS", 5)
    settings = samples.settings(ranks=16)
    events = checked(chrome_trace([Process("p", simulated_steps([plan(16)], settings))]))
    assert {one["tid"] for one in slices(events)} == {1, 2, 6, 10, 13, 17}


def test_a_run_has_its_steps_its_metrics_and_the_step_that_was_measured(tmp_path: Path) -> None:
    made = plan(2)
    run = read_run(write_run(tmp_path, lines=metrics(12), traced=made))
    events = checked(chrome_trace([Process("a", run=run), Process("b", run=run)]))
    own = [one for one in events if one["pid"] == 2]
    steps = slices(own, "step")
    assert [one["name"] for one in steps] == [f"step {step}" for step in range(1, 13)]
    assert [one["ts"] for one in steps] == pytest.approx([2.25e6 * step for step in range(12)])
    measured = [one for one in slices(own) if one["tid"] > 1]
    assert len(measured) == made.micro_batches == len(spans(made))
    assert min(one["ts"] for one in measured) == steps[6]["ts"], "step 7 was measured"
    losses = [one["args"]["loss"] for one in own if one["ph"] == "C" and one["name"] == "loss"]
    assert losses == [line["loss"] for line in run.lines]
    waits = [one["name"] for one in slices(own, "wait")]
    assert waits == ["waits for the plan", "waits for data"] * 12


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    lines = metrics(3)
    lines[0]["loss"], lines[1]["step_s"] = math.nan, None
    del lines[2]["plan_wait_s"]
    events = checked(chrome_trace([Process("a", run=read_run(write_run(tmp_path, lines=lines, traced=None)))]))
    assert len([one for one in events if one["ph"] == "C" and one["name"] == "loss"]) == 2
    assert checked(chrome_trace([Process("empty", run=read_run(write_run(tmp_path, lines=[], traced=None)))]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"ph": "X", "dur": -1.0},
        {"ts": "0"},
        {"ts": float("nan")},
        {"tid": 99},
        {"args": None},
        {"ts": 0.5},
        {"ph": "B"},
    ],
)
def test_the_check_can_fail(wrong: Event) -> None:
    settings = samples.settings(ranks=2)
    trace = json.loads(chrome_trace([Process("p", simulated_steps([plan(2)], settings))]))
    assert checked(json.dumps(trace).encode())
    at = next(n for n, one in enumerate(trace["traceEvents"]) if one["ph"] == "X" and one["tid"] == 2)
    event = trace["traceEvents"][at]
    event |= {"ts": event["dur"] / 2} if wrong == {"ts": 0.5} else wrong  # half of it over the next one
    with pytest.raises((AssertionError, KeyError)):
        checked(json.dumps(trace).encode())
