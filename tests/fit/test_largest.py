from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.load import load
from engine.config.schema import Config
from engine.cost.budget import most_tokens
from engine.errors import MemoryFitError
from engine.fit.estimate import estimate
from engine.fit.largest import among, largest_capacity, least_nodes, least_ranks, longest_context, named_ratio, of_ranks
from engine.fit.problem import fit_problem
from engine.job import Job
from engine.planner.checks import check_longest
from engine.planner.make import plan_step
from engine.planner.planners import PLANNERS
from tests.planner.samples import ints, settings
from tests.presets import LLAMA3_8B_2M, LLAMA7B_2M, LLAMA7B_256K
from tests.refusals import refused

KEYS = [
    LLAMA7B_2M,
    [*LLAMA7B_2M, "offload.ratio=0"],
    ["recipe=llama70b-2m-paper", "offload.ratio=0.5"],
    [*LLAMA3_8B_2M, "recompute=layer", "optimizer.on_host=true"],
    ["recipe=mixtral8x7b-2m", "cluster.host_memory=20GiB"],
    ["recipe=h200-1b-64k", "mlp_tile=1K"],
    ["recipe=quickstart"],
]
CASES = [load(keys) for keys in KEYS]


def fits(config: Config, capacity: int) -> bool:
    """Whether the estimate says that this capacity fits, with a context no longer than it."""
    changed = config.model_copy(update={"capacity": capacity, "context": capacity})
    return estimate(Job(changed)).fits


@pytest.mark.parametrize("config", CASES, ids=map(" ".join, KEYS))
def test_the_fitted_capacity_fits_and_one_token_more_does_not(config: Config) -> None:
    own = Job(config).settings
    most = largest_capacity(own)
    assert fits(config, most)
    assert not fits(config, most + 1)
    assert longest_context(own) == own.ranks * most


@given(st.integers(3000, 10**6), st.integers(0, 10**6), st.sampled_from([0, 300_000, 10**6]))
def test_a_capacity_of_any_device_and_host(device: int, host: int, ratio: int) -> None:
    own = replace(settings(device_memory=device), offload=ratio, host_memory=host)
    costs, most = own.costs, largest_capacity(own)
    for tokens in (most, most + 1):
        least = [r for r in range(0, ratio + 1, 10_000) if costs.peak_bytes(ints(tokens), ints(tokens), r)[0] <= device]
        fits_at_some = any(costs.host_bytes(ints(tokens), r)[0] <= host for r in least)
        if tokens == most and most:
            assert int(costs.peak_bytes(ints(most), ints(most), ratio)[0]) <= device
        else:
            assert not fits_at_some or tokens == 0


@pytest.mark.parametrize("config", CASES[:5], ids=map(" ".join, KEYS[:5]))
def test_the_least_ranks_hold_the_context_and_fewer_do_not(config: Config) -> None:
    ranks = least_ranks(Job(config))
    group = config.parallel.tp * config.parallel.pp
    step = max(1, config.cluster.ranks_per_node // group)
    assert ranks is not None
    assert longest_context(among(Job(config), ranks)) >= config.context
    fewer = ranks - (step if ranks > step else 1)
    assert fewer == 0 or longest_context(among(Job(config), fewer)) < config.context


def test_ranks_beyond_a_node_are_those_of_whole_nodes() -> None:
    keys = [*LLAMA3_8B_2M, "offload.ratio=0"]
    config = load(keys)
    ranks = least_ranks(Job(config))
    assert ranks is not None and ranks % 8 == 0
    few = load([*keys, "context=20K"])
    ranks = least_ranks(Job(few))
    assert ranks is not None and ranks < 8


@pytest.mark.parametrize(
    "keys", ["parallel.tp=2 parallel.pp=3", "parallel.pp=12", "parallel.tp=16 model.kv_heads=16", "parallel.pp=8"]
)
@pytest.mark.parametrize("context", ["8K", "2M"])
def test_the_least_ranks_are_a_cluster_that_can_be_asked_for(keys: str, context: str) -> None:
    """Ranks on parts of a node and on several nodes: the keys are valid, and hold the context."""
    given_ = ["cluster.nodes=768", *LLAMA7B_2M, f"context={context}", *keys.split()]
    config = load(given_)
    ranks = least_ranks(Job(config))
    assert ranks is not None
    asked = of_ranks(Job(config), ranks)
    there = load([*given_[1:], *(f"{key}={value}" for key, value in asked.items())])
    assert Job(there).settings.ranks == ranks
    assert estimate(Job(there)).fits


def test_no_cluster_has_more_ranks_than_can_be_planned() -> None:
    config = load([*LLAMA7B_2M, "cluster.host_memory=0", "cluster.device_memory=50GiB"])
    assert largest_capacity(among(Job(config), 2**16)) < 2**16
    longer = config.model_copy(update={"context": 2**32})
    assert least_ranks(Job(longer)) is None


@pytest.mark.parametrize("offload", ["0", "auto"])
def test_of_a_mixed_cluster_the_context_is_all_that_its_smallest_ranks_hold(tmp_path: Path, offload: str) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2 memory=2G\n")
    own = Job(load([f"cluster.hostfile={tmp_path / 'hosts'}", f"offload.ratio={offload}"])).settings
    full = replace(own, capacity=largest_capacity(own))
    small = int(own.cluster.memory.min())
    assert longest_context(own) == 4 * most_tokens(own.costs, own.budget(small)) < 4 * full.capacity
    plan_step(ints(longest_context(own)), replace(full, context=longest_context(own)))
    with pytest.raises(MemoryFitError):
        check_longest(longest_context(own) + 1, replace(full, capacity=2 * full.capacity))


def test_a_ratio_that_is_named_is_what_the_host_has_to_hold() -> None:
    """The device would need less, but the host must hold the named ratio."""
    keys = [*LLAMA7B_2M, "offload.ratio=0.9", "cluster.host_memory=20GiB"]
    config = load(keys)
    own = Job(config).settings
    most = largest_capacity(own, named_ratio(config))
    assert most < largest_capacity(own)
    for capacity, fit in ((most, True), (most + 1, False)):
        asked = load([*keys, f"capacity={capacity}"])
        assert (fit_problem(Job(asked)) is None) == fit


def test_no_number_of_ranks_helps_a_device_that_is_full_without_tokens() -> None:
    config = load([*LLAMA7B_2M, "cluster.device_memory=16GiB"])
    assert least_ranks(Job(config)) is None
    assert least_nodes(Job(config)) is None


def test_the_least_nodes_on_which_the_capacity_fits() -> None:
    keys = [*LLAMA7B_2M, "offload.ratio=0", "context=8K", "cluster.device_memory=72GiB", "cluster.headroom=0"]
    config = load([*keys, "cluster.nodes=1"])
    nodes = least_nodes(Job(config))
    assert nodes is not None and nodes > 1
    for count, fit in ((nodes, True), (nodes - 1, False)):
        there = load([*keys, f"cluster.nodes={count}"])
        assert estimate(Job(there)).fits == fit


def test_settings_among_the_same_ranks_are_the_same() -> None:
    for config in CASES:
        own = Job(config).settings
        other = among(Job(config), own.ranks)
        assert (other.costs, other.host_memory, other.device_memory) == (own.costs, own.host_memory, own.device_memory)
        assert longest_context(other) == longest_context(own)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("mode", ["free", "lockstep"])
def test_a_capacity_that_fits_only_with_offload_is_planned_with_it(planner: str, mode: str) -> None:
    """Unsplit sequences are offloaded too, no more than necessary; without offload the step is refused."""
    full = int(settings().costs.peak_bytes(ints(16), ints(16))[0])
    asked = replace(settings(planner, mode=mode, device_memory=full - 300), offload=10**6, host_memory=10**6)
    plan = plan_step(ints(16, 16, 16, 9, 3, 40, 1), asked)
    assert plan.offload.any() and (plan.offload < 10**6).all()
    with pytest.raises(MemoryFitError):
        plan_step(ints(16, 16), replace(asked, offload=0))
    with refused(MemoryFitError, "capacity") as problems:
        plan_step(ints(16, 16), replace(asked, host_memory=10))
    assert "300 bytes" in problems[0].message and "10 bytes" in problems[0].message


def test_states_that_the_host_cannot_hold_are_refused_by_name() -> None:
    config = load([*LLAMA7B_256K, "optimizer.on_host=true", "cluster.host_memory=16M"])
    with refused(MemoryFitError, "cluster.host_memory"):
        plan_step(np.array([100]), Job(config).settings)
