"""Means over steps and speed-ups against sums by hand over single steps."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config.load import load
from engine.job import Job
from engine.planner.make import plan_step
from engine.planner.planners import PLANNERS
from engine.simulator.compare import BASELINE, TUNED, compare, rows
from engine.simulator.facts import Facts, outcome
from engine.simulator.timeline import simulate

SMALL = ["cluster=h100x8", "model=llama7b", "context=64K", "capacity=16K", "dtype=bf16", "cluster.nodes=2"]
SETTINGS = Job(load([*SMALL, "cluster.device_memory=1T"])).settings
ASKED = ["adaptive", "naive", "balanced"]
STEPS = [
    np.clip(np.random.default_rng(seed).lognormal(8, 2, 30 + 40 * seed), 1, 64 * 1024).astype(np.int64)
    for seed in range(3)
]
SUMMED = (
    "step_s", "compute_s", "exposed_comm_s", "bubble", "mfu", "ring_bytes_in_nodes", "ring_bytes_between_nodes",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs() -> list[Facts]:
    return compare(STEPS, rows(SETTINGS, ASKED))


def single(lengths: np.ndarray, planner: str) -> Facts:
    plan = plan_step(lengths, SETTINGS.by(planner))
    return outcome(plan, SETTINGS, simulate(plan, SETTINGS))


def number(facts: Facts, name: str) -> float:
    return float(facts[name])


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_means_over_the_same_steps(runs: list[Facts], planner: str) -> None:
    (run,) = [run for run in runs if run["label"] == planner]
    steps = [single(lengths, planner) for lengths in STEPS]
    for name in SUMMED:
        assert number(run, name) == pytest.approx(sum(number(step, name) for step in steps) / 3), name
    tokens = sum(int(lengths.sum()) for lengths in STEPS)
    assert run["tokens_per_s"] == pytest.approx(tokens / sum(number(step, "step_s") for step in steps))
    assert run["peak_bytes"] == max(number(step, "peak_bytes") for step in steps), "the worst step must fit"


def test_speed_ups_are_ratios_of_mean_times_to_the_static_mesh(runs: list[Facts]) -> None:
    assert runs[0]["speedup"] == 1
    for run in runs:
        assert run["speedup"] == pytest.approx(number(runs[0], "step_s") / number(run, "step_s"))


def test_speed_ups_are_relative_to_the_static_mesh_for_any_planners(runs: list[Facts]) -> None:
    asked = compare(STEPS, rows(SETTINGS, ["naive", "adaptive", "naive"]))
    labels = [BASELINE, "naive", "naive, no eq. 3", "adaptive"]
    assert [run["label"] for run in asked] == labels
    assert asked == [run for label in labels for run in runs if run["label"] == label]


def test_rings_without_equation_3_are_those_without_offload() -> None:
    for planner in ("naive", "balanced"):
        by_equation, without = (rows(SETTINGS, [planner])[name] for name in (planner, f"{planner}, no eq. 3"))
        plans = [plan_step(STEPS[2], one) for one in (by_equation, without, SETTINGS.by(planner).without_offload())]
        assert (plans[1].degrees == plans[2].degrees).all() and (plans[0].degrees < plans[1].degrees).any()
    assert list(rows(SETTINGS.without_offload(), ["naive"])) == [BASELINE, "naive"]


def test_a_capacity_that_needs_offload_has_it_without_equation_3_too() -> None:
    config = load([*SMALL, "capacity=64K", "zero.stage=3"])
    without = rows(Job(config).settings, ["naive"])["naive, no eq. 3"]
    plan = plan_step(np.full(20, 60_000), without)
    assert plan.degrees.max() == 1 and plan.offload.max() > 0


def test_static_at_its_best_settings_is_a_baseline_too() -> None:
    """Its settings may be those of another mesh."""
    best = Job(load([*SMALL, "parallel.tp=4"])).settings.by(BASELINE)
    found = compare(STEPS, rows(SETTINGS, ["adaptive"], best))
    assert [(run["label"], run["planner"], run["tuned"], run["ranks"]) for run in found] == [
        ("static", "static", False, 16),
        (TUNED, "static", True, 4),
        ("adaptive", "adaptive", False, 16),
    ]
    step_s = [number(run, "step_s") for run in found]
    assert [run["speedup"] for run in found] == [step_s[0] / one for one in step_s]
    assert [run["speedup_tuned"] for run in found] == [step_s[1] / one for one in step_s]


def test_one_rank_has_nothing_to_gain() -> None:
    alone = Job(load(["cluster.ranks_per_node=1", "context=2K", "capacity=2K"])).settings
    runs = compare([np.array([2048, 100, 7], dtype=np.int64)], rows(alone, ASKED))
    assert [number(run, "speedup") for run in runs] == pytest.approx([1] * 4)
    assert {number(run, "exposed_comm_s") for run in runs} == {0}
