"""A page of each kind, of a small cluster or of invented runs. Each is made once: drawing takes most of a test."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.config.load import load
from engine.data.lengths import step_lengths
from engine.data.profile import describe
from engine.data.scan import Documents
from engine.fit.estimate import estimate
from engine.job import Job
from engine.planner.make import plan_step
from engine.report.comparison_page import comparison_page
from engine.report.lengths_page import lengths_page
from engine.report.memory_page import memory_page
from engine.report.page import Page
from engine.report.plan_page import Planned, plan_page
from engine.report.run import RunData, read_run
from engine.report.run_page import run_page
from engine.report.simulation_page import simulation_page
from engine.simulator.compare import compare, rows
from engine.simulator.facts import facts
from tests.report.runs import metrics, plan, write_run

SMALL = ["lengths=byted", "lengths.max=8K", "batch_tokens=64K", "context=8K", "capacity=2K", "cluster.ranks_per_node=4"]


@cache
def plans(*overrides: str, steps: int = 1) -> Page:
    job = Job(load([*SMALL, *overrides]))
    settings = job.settings
    made = [plan_step(lengths, settings) for lengths in step_lengths(job.config, steps)]
    found = [facts(plan, settings) | {"planning_s": 0.25, "verified": True} for plan in made]
    return plan_page(Planned(job, made, found))


@cache
def simulation(*sweeps: str) -> Page:
    config = load(SMALL)
    (lengths,) = step_lengths(config, 1)
    shared = {"context": config.context, "lengths": config.lengths.name}
    compared = rows(Job(config).settings, ["adaptive"])
    found = compare([lengths], compared)
    swept = [{"sweep": sweep} for sweep in sweeps] or [{}]
    runs = [extra | shared | run for extra in swept for run in found]
    return simulation_page(config, runs, lengths, compared, "bytescale tune recipe=quickstart")


@cache
def lengths(share: float = 1.0, *, fits: bool = True) -> Page:
    config = load(SMALL)
    (step,) = step_lengths(config, 1)
    found = describe(Documents(step, empty=2, fraction=share), config.context)
    data = found | {
        "source": "lengths=byted",
        "sources": [found | {"name": "byted", "share": 1.0}],
        "suggested_capacity": 2048,
        "suggested_ring_limit": 3,
        "reason": "each rank runs its part of a step as one micro-batch",
        "fits": fits,
    }
    settings = Job(config).settings
    return lengths_page(config, data, [facts(plan_step(step, settings), settings)] if fits else [])


@cache
def memory() -> Page:
    job = Job(load(SMALL))
    return memory_page(job, estimate(job), [("largest capacity that fits", "capacity=9")])


@cache
def _run(planner: str, seconds: float) -> RunData:
    more = {"step_s": seconds, "mfu": 0.9 / seconds, "unsplit": 0.8, "peak_memory": 3 * 2**30}
    lines = [line | more | {"tokens_per_s": line["tokens"] / seconds} for line in metrics(120)]
    with TemporaryDirectory() as folder:
        return read_run(write_run(Path(folder), overrides=(f"planner={planner}",), lines=lines, traced=plan(4)))


@cache
def run() -> Page:
    return run_page(_run("adaptive", 2.0))


@cache
def comparison() -> Page:
    return comparison_page([_run("static", 4.6), _run("adaptive", 2.0)], ["fixed", "ours"])


PAGES = {
    "run": run,
    "comparison": comparison,
    "plan": plans,
    "simulation": simulation,
    "lengths": lengths,
    "memory": memory,
}
