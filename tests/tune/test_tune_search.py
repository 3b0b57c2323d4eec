"""The search finds what simulating every candidate finds, and every candidate is accounted for."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from engine.config.checks import check
from engine.config.load import load
from engine.config.schema import Config
from engine.data.lengths import step_lengths
from engine.fit.estimate import estimate, estimate_fullest, estimate_plans
from engine.fit.problem import fit_problem
from engine.fit.suggestions import with_values
from engine.job import Job
from engine.planner.make import plan_step
from engine.planner.settings import PlanSettings
from engine.simulator.compare import mean_outcome
from engine.tune.search import (
    BOUNDED,
    INVALID,
    SHOWN,
    SLOWER,
    TOO_LARGE,
    UNPLANNED,
    UNTRIED,
    Search,
    behind,
    enough_nodes,
    search,
    tuned_static,
)
from engine.tune.space import SEARCHED, capacities, layouts
from engine.units import Ints
from tests.presets import fixed

pytestmark = pytest.mark.long

SMALL = ["recipe=llama7b-256k", "cluster=h100x8", "cluster.nodes=1", "context=64K", "batch_tokens=128K"]
SMALL += ["lengths=byted", "lengths.max=64K"]
NEVER = float("inf")
FIXED = ["offload.ratio", "recompute"]


@pytest.fixture(scope="module")
def config() -> Config:
    return load([*SMALL, "offload.ratio=0", "recompute=layer"])


@pytest.fixture(scope="module")
def steps(config: Config) -> list[Ints]:
    return list(step_lengths(config, 1))


@pytest.fixture(scope="module")
def whole(config: Config, steps: list[Ints]) -> Search:
    """A search that ends by itself."""
    return search(Job(config), steps, NEVER, FIXED)


def simulated(steps: list[Ints], settings: PlanSettings) -> float:
    return float(mean_outcome([plan_step(lengths, settings) for lengths in steps], settings)["step_s"])


def test_the_best_five_are_those_of_an_exhaustive_search(config: Config, steps: list[Ints], whole: Search) -> None:
    """If a lower bound were too high, a faster candidate would be left out."""
    every = list(Search(steps).candidates(Job(config), FIXED))
    fastest: dict[tuple[object, ...], float] = {}
    for one in every:
        step_s = simulated(steps, one.job.settings)
        assert one.bound_s <= step_s + 1e-9, "simulated times are whole nanoseconds"
        fastest[one.layout] = min(step_s, fastest.get(one.layout, step_s))
    assert [one.step_s for one in whole.best()] == sorted(fastest.values())[:SHOWN]


def test_expert_parallelism_is_searched_wherever_the_rules_allow_it() -> None:
    config = load(fixed("mixtral8x7b-256k"))
    found = list(layouts(config, []))
    assert {changes["parallel.ep"] for changes in found} == {1, 2, 4, 8}
    for degree in (2, 4, 8):
        every = layouts(with_values(config, {"parallel.ep": degree}), ["parallel.ep"])
        allowed = [changes for changes in every if not check(with_values(config, changes))]
        ours = [changes for changes in found if changes["parallel.ep"] == degree]
        assert allowed and allowed == [changes for changes in ours if not check(with_values(config, changes))]
    assert not any("parallel.ep" in changes for changes in layouts(load(["recipe=llama7b-256k"]), []))


def test_some_candidates_are_left_out_by_their_bound(whole: Search) -> None:
    assert whole.fallen[BOUNDED].count > 0 and UNTRIED not in whole.fallen


def test_every_candidate_is_counted_once(config: Config, steps: list[Ints], whole: Search) -> None:
    fits = len(list(Search(steps).candidates(Job(config), FIXED)))
    dropped = {reason: one.count for reason, one in whole.fallen.items()}
    late = sum(dropped.get(reason, 0) for reason in (BOUNDED, UNTRIED, SLOWER, UNPLANNED))
    assert fits == len(whole.best()) + late
    assert dropped.keys() >= {INVALID, TOO_LARGE}


def test_the_best_are_valid_fit_and_have_different_layouts(whole: Search) -> None:
    best = whole.best()
    assert len({one.candidate.layout for one in best}) == len(best) == SHOWN
    for one in best:
        assert check(one.candidate.job.config) == [] and fit_problem(one.candidate.job) is None
        assert one.memory.fits and sum(one.parts().values()) == pytest.approx(one.step_s)


def test_a_search_out_of_time_says_what_it_left(config: Config, steps: list[Ints]) -> None:
    found = search(Job(config), steps, time.monotonic() - 1, FIXED)
    assert len(found.trials) == 1 and found.fallen[UNTRIED].count > 0


@pytest.mark.parametrize(
    "keys", [["parallel.tp=2", "capacity=9000", "cluster.nodes=2"], ["offload.ratio=0.5", "zero.stage=2"]]
)
def test_the_config_itself_is_a_candidate(keys: list[str], steps: list[Ints]) -> None:
    """So the best is never slower than what the user has, even if there is no time."""
    own = load([*SMALL, "recompute=layer", *keys])
    found = search(Job(own), steps, time.monotonic() - 1)
    assert found.own is not None and found.own.candidate.job.config == own and found.trials == [found.own]
    assert found.own.step_s == simulated(steps, Job(own).settings)


def test_what_trials_showed_decides_what_comes_next(config: Config, steps: list[Ints], whole: Search) -> None:
    """A layout whose step took far longer than expected waits until all others had a trial."""
    left = list(Search(steps).candidates(Job(config), FIXED))
    found, first = Search(steps), min(left, key=lambda one: one.expected_s)
    assert found.most_promising(left) is first
    found.trials = [replace(whole.best()[0], candidate=first, facts={"step_s": 1000 * first.expected_s})]
    others = [one for one in left if one.layout != first.layout]
    assert found.most_promising(left) is min(others, key=lambda one: one.expected_s)
    # The ratio of the best trial counts.
    found.trials.append(replace(found.trials[0], facts={"step_s": first.expected_s}))
    assert found.most_promising(left) is first


def test_the_expected_time_counts_what_the_bound_leaves_out(config: Config, steps: list[Ints]) -> None:
    """Stages that wait: the more, the larger the micro-batches are."""
    for one in Search(steps).candidates(Job(config), FIXED):
        assert one.expected_s >= one.bound_s * (1 - 1e-9)
        if one.job.config.parallel.pp > 1:
            twice = {"capacity": 2 * one.job.config.capacity}
            larger = replace(one, job=one.job.with_config(one.job.config.model_copy(update=twice)))
            full = twice["capacity"] * one.job.settings.ranks <= config.batch_tokens
            assert larger.expected_s > one.expected_s or not full


def test_fixed_keys_keep_their_value(config: Config) -> None:
    found = list(layouts(config, SEARCHED))
    assert [(one["parallel.tp"], one["zero.stage"]) for one in found] == [(config.parallel.tp, config.zero.stage)]
    assert {one["offload.ratio"] for one in layouts(config, [])} == {0.0, "auto"}


def test_degrees_divide_the_model() -> None:
    found = list(
        layouts(load([*SMALL, "parallel.tp=1", "model.heads=12", "model.kv_heads=6", "model.hidden=1536"]), [])
    )
    assert {one["parallel.tp"] for one in found} == {1, 2}


def test_weights_on_the_host_are_given_up_below_zero3() -> None:
    own = load([*SMALL, "zero.stage=3", "zero.weights_on_host=true"])
    for one in layouts(own, []):
        assert (one["zero.stage"] == 3) != ("zero.weights_on_host" in one)


def test_capacities_fit_and_are_readable(config: Config) -> None:
    sizes = capacities(Job(config))
    assert sizes == sorted(set(sizes), reverse=True) and len(sizes) > 1
    for size in sizes:
        assert size % 1024 == 0
        sized = config.model_copy(update={"capacity": size})
        assert estimate(Job(sized)).fits


def test_what_is_behind_is_the_part_that_grows_most(whole: Search) -> None:
    first, *others = whole.best()
    for one in others:
        parts = {name: seconds - first.parts()[name] for name, seconds in one.parts().items()}
        assert behind(one, first).endswith(max(parts, key=lambda name: parts[name]))


def test_nothing_fits(config: Config) -> None:
    tiny = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device_memory": 2**30})})
    found = search(Job(tiny), [np.array([1024])], NEVER)
    assert found.best() == [] and found.own is None and found.fallen.keys() == {INVALID, TOO_LARGE}


def test_the_fewest_nodes_that_fit() -> None:
    """Of all settings that are searched, not of the config's own. 70B does not fit on one node."""
    own = load(["recipe=llama70b-2m", "cluster.nodes=1", "recompute=layer", "context=8K", "batch_tokens=1M"])
    steps = [np.array([8192] * 128)]
    nodes = enough_nodes(Job(own), steps, ["recompute"], NEVER)
    assert nodes is not None and nodes > 1
    for count in (nodes - 1, nodes):
        more = own.model_copy(update={"cluster": own.cluster.model_copy(update={"nodes": count})})
        assert any(Search(steps).candidates(Job(more), ["recompute"])) == (count == nodes)


def test_a_look_for_nodes_ends() -> None:
    """With a capacity of 64M tokens nothing fits on any number of nodes."""
    own = load(["recipe=llama70b-2m", "cluster.nodes=1", "capacity=64M"])
    began = time.monotonic()
    assert enough_nodes(Job(own), [np.array([8192])], ["capacity"], began + 1) is None
    assert time.monotonic() - began < 30


def test_memory_is_that_of_the_simulated_plans_too() -> None:
    """In a pipeline they hold more micro-batches than the largest one needs by 1F1B's count."""
    config = load(["recipe=llama70b-2m-paper", "offload.ratio=0"])
    fixed = ["parallel.tp", "parallel.pp", "zero.stage", "recompute", "offload.ratio", "capacity"]
    steps = list(step_lengths(config, 1))
    (trial,) = search(Job(config), steps, NEVER, fixed).best()
    settings = Job(config).settings
    plans = [plan_step(lengths, settings) for lengths in steps]
    of_plans = estimate_plans(Job(config), plans).peak
    assert trial.memory.peak == of_plans > estimate_fullest(Job(config)).peak


@pytest.mark.slow  # plans for 8,192 devices; no other test has this ratio
def test_a_pipeline_of_slices_is_about_as_fast_as_no_pipeline_at_8192_devices() -> None:
    """For 70B at 2M with ZeRO-1 and tp 8. With whole sequences, four stages took 1.3 times as long as one."""
    keys = ["recipe=llama70b-2m-paper", "zero.stage=1", "recompute=layer_keep_attention", "offload.ratio=0"]
    fixed = ["parallel.tp", "parallel.pp", "zero.stage", "recompute", "offload.ratio"]
    step_s = {}
    for stages in (1, 4):
        config = load([*keys, f"parallel.pp={stages}"])
        step_s[stages] = search(Job(config), list(step_lengths(config, 1)), NEVER, fixed).best()[0].step_s
    assert 0.95 < step_s[4] / step_s[1] < 1.1


def test_the_search_for_static_is_complete_and_simulates_few(steps: list[Ints]) -> None:
    """Its best is that of simulating every candidate, because the bound is nearly the time."""
    config = load([*SMALL, "planner=static"])
    found = tuned_static(Job(config), steps, NEVER)
    every = list(Search(steps).candidates(Job(config), []))
    fastest = min(every, key=lambda one: simulated(steps, one.job.settings))
    assert found.best()[0].step_s == pytest.approx(simulated(steps, fastest.job.settings), rel=1e-6)
    assert found.left == 0 and len(found.trials) < 10 < len(every)
