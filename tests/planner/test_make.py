"""Every planner keeps every rule on any cluster; steps that cannot be planned are refused with clear messages."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.config.units import format_apart
from engine.cost import budget
from engine.errors import ConfigError, DataError, MemoryFitError, PlanError
from engine.fit.largest import largest_capacity
from engine.planner.make import MOST_SEQUENCES, plan_step
from engine.planner.plan.emit import emit
from engine.planner.plan.step_plan import StepPlan
from engine.planner.planners import PLANNERS
from engine.planner.proof.verify import verify
from engine.planner.settings import PlanSettings
from engine.units import PPM
from tests.planner.executor import finishes
from tests.planner.samples import COSTS, LINKED_COSTS, RATES, device, ints, lengths, settings, staged_costs
from tests.refusals import refused

MODES = ("free", "lockstep", "pipeline")


def asked_for(planner: str, ranks: int, capacity: int, mode: str, data: st.DataObject) -> PlanSettings:
    """Settings with and without transfers; a pipeline has 1 to 4 stages."""
    stages = data.draw(st.integers(1, 4)) if mode == "pipeline" else 1
    costs = data.draw(st.sampled_from([COSTS, LINKED_COSTS]))
    return replace(settings(planner, ranks, capacity, mode, stages=stages), costs=staged_costs(stages, costs))


@given(
    planner=st.sampled_from(sorted(PLANNERS)),
    mode=st.sampled_from(MODES),
    ranks=st.integers(1, 64),
    capacity=st.integers(1, 300),
    data=st.data(),
)
def test_every_plan_holds_every_rule(planner: str, mode: str, ranks: int, capacity: int, data: st.DataObject) -> None:
    """With and without a host to offload to."""
    step = ints(*data.draw(lengths(ranks * capacity)))
    offload = data.draw(st.sampled_from([0, 500_000, PPM]))
    asked = replace(asked_for(planner, ranks, capacity, mode, data), offload=offload, host_memory=2**40)
    plan = plan_step(step, asked)
    verify(plan, asked)
    assert (plan.planner, plan.mode, plan.stages) == (planner, mode, asked.stages)
    assert np.array_equal(plan.sequence_lengths, step)
    assert offload or not plan.offload.any()


@pytest.mark.long
@hypothesis.settings(max_examples=300)
@given(
    planner=st.sampled_from(sorted(PLANNERS)),
    mode=st.sampled_from(MODES),
    ranks=st.integers(1, 12),
    capacity=st.integers(2, 300),
    data=st.data(),
)
def test_every_plan_that_needs_offload_holds_every_rule(
    planner: str, mode: str, ranks: int, capacity: int, data: st.DataObject
) -> None:
    """With the smallest device, or host, that a full micro-batch needs: rings of uneven shards must fit it too."""
    asked = asked_for(planner, ranks, capacity, mode, data)
    asked = replace(asked, context=data.draw(st.integers(1, ranks * capacity)))
    full = ints(capacity)
    away = data.draw(st.integers(1, PPM))
    device = int(asked.costs.peak_bytes(full, full, away)[0])
    host = int(asked.costs.host_bytes(full, budget.least(asked.costs, capacity, capacity, device))[0])
    asked = replace(asked, cluster=replace(asked.cluster, device_memory=device), offload=PPM)
    asked = replace(asked, host_memory=data.draw(st.sampled_from([host, host + 500, 2**40])))
    step = ints(*data.draw(lengths(asked.context)))
    verify(plan_step(step, asked), asked)


@given(planner=st.sampled_from(sorted(PLANNERS)), mode=st.sampled_from(MODES), data=st.data())
def test_every_plan_of_a_cluster_of_any_nodes_holds_every_rule(planner: str, mode: str, data: st.DataObject) -> None:
    """Nodes of any speed and memory, with and without a host to offload to."""
    kinds = st.tuples(st.integers(1, 8), st.sampled_from([100, 50, 7]), st.sampled_from([None, 2**18, 2**21]))
    nodes = data.draw(st.lists(kinds, min_size=1, max_size=4))
    hosts = tuple(Node(f"host-{at}", *kind) for at, kind in enumerate(nodes))
    cluster = Cluster(hosts, device_memory=2**20)
    asked = asked_for(planner, cluster.ranks, 50, mode, data)
    costs = staged_costs(asked.stages, replace(COSTS, rates=RATES, nics=2.0, slot=500))
    asked = replace(asked, cluster=cluster, costs=costs)
    asked = replace(asked, offload=data.draw(st.sampled_from([0, 500_000, PPM])), host_memory=2**40)
    step = ints(*data.draw(lengths(cluster.ranks * min(50, asked.least_capacity))))
    verify(plan_step(step, asked), asked)


@given(
    planner=st.sampled_from(sorted(PLANNERS)),
    mode=st.sampled_from(MODES),
    ranks=st.integers(1, 6),
    capacity=st.integers(1, 20),
    data=st.data(),
)
def test_every_plan_finishes(planner: str, mode: str, ranks: int, capacity: int, data: st.DataObject) -> None:
    step = ints(*data.draw(lengths(ranks * capacity, most=12)))
    assert finishes(plan_step(step, asked_for(planner, ranks, capacity, mode, data)))


@pytest.mark.parametrize("planner", ["naive", "balanced"])
def test_hdp_gives_each_sequence_the_fewest_ranks_that_hold_it(planner: str) -> None:
    step = ints(1, 15, 16, 17, 32, 33, 112)
    assert plan_step(step, settings(planner, ranks=7)).degrees.tolist() == [1, 1, 1, 2, 2, 3, 7]


IN_ANOTHER_PROCESS = """
import numpy as np
from engine.planner.make import plan_step
from engine.planner.planners import PLANNERS
from tests.planner.samples import settings
lengths = np.random.default_rng(3).integers(1, 200, 90)
for planner in PLANNERS:
    for mode in ("free", "lockstep", "pipeline"):
        stages = 3 if mode == "pipeline" else 1
        print(planner, mode, plan_step(lengths, settings(planner, ranks=13, mode=mode, stages=stages)).digest)
print("few", "free", plan_step(lengths[:7] // 4 + 1, settings("adaptive")).digest)
"""


@pytest.mark.long
def test_the_same_input_gives_the_same_bytes_in_another_process(pytestconfig: pytest.Config) -> None:
    """For every planner in every mode. Hashes of strings differ between processes; no plan may depend on them."""
    step = np.random.default_rng(3).integers(1, 200, 90)
    here = [
        f"{name} {mode} {plan_step(step, settings(name, 13, mode=mode, stages=3 if mode == 'pipeline' else 1)).digest}"
        for name in PLANNERS
        for mode in MODES
    ]
    here.append(f"few free {plan_step(step[:7] // 4 + 1, settings('adaptive')).digest}")
    assert len({line.split()[2] for line in here}) == len(here)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS]
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        other = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=pytestconfig.rootpath, env=environment
        )
        assert other.stdout.splitlines() == here


def test_a_plan_shares_no_memory_with_its_caller() -> None:
    step = ints(3, 40)
    plan = plan_step(step, settings())
    step[0] = 99
    assert plan.lengths.tolist() == [3, 40]


def test_a_sequence_that_all_ranks_cannot_hold_is_refused() -> None:
    with refused(MemoryFitError, "context"):
        plan_step(ints(3, 65), settings(context=100))


def test_a_sequence_above_the_context_is_refused() -> None:
    with refused(ConfigError, "context"):
        plan_step(ints(3, 33), settings(context=32))


@pytest.mark.parametrize("length", [0, -5])
def test_a_length_that_is_not_positive_is_refused(length: int) -> None:
    with refused(DataError, None, hint=False):
        plan_step(ints(3, length), settings())


def test_a_step_without_sequences_is_refused() -> None:
    with refused(DataError, None, hint=False):
        plan_step(ints(), settings())


@pytest.mark.parametrize("lengths", [[100.9, 1.99], [[1, 2], [3, 4]], [True, False]])
def test_lengths_that_are_not_a_1d_array_of_integers_are_refused(lengths: list[object]) -> None:
    with refused(DataError, None, hint=False):
        plan_step(np.array(lengths), settings())


def test_more_sequences_than_can_be_planned_in_time_are_refused() -> None:
    with refused(ConfigError, "batch_tokens"):
        plan_step(np.ones(MOST_SEQUENCES + 1, dtype=np.int64), settings())


def test_a_node_that_holds_nothing_is_refused_by_name() -> None:
    cluster = Cluster((Node("large", 2), Node("tiny", 2, memory=COSTS.fixed_bytes)), 2**40)
    with refused(MemoryFitError, "cluster.hostfile"):
        plan_step(ints(3, 4), replace(settings(), cluster=cluster))


def test_a_sequence_that_a_small_node_cannot_hold_is_refused_with_what_would_do() -> None:
    """Each of the six ranks counts with the capacity of the smallest."""
    cluster = Cluster((Node("large", 4), Node("small", 2, memory=3500)), 6000)
    asked = replace(settings(capacity=40, context=1000), cluster=cluster)
    least = asked.least_capacity
    with refused(MemoryFitError, "context") as problems:
        plan_step(ints(6 * least + 1), asked)
    assert f"context={6 * least}," in str(problems[0].hint)
    plan_step(ints(6 * least), asked)


def test_the_largest_capacity_with_offload_is_planned_and_one_more_token_refused() -> None:
    full = int(COSTS.peak_bytes(ints(40), ints(40), PPM)[0])
    asked = replace(settings(capacity=41, device_memory=full), offload=PPM, host_memory=2**40)
    with refused(MemoryFitError, "capacity"):
        plan_step(ints(41), asked)
    assert largest_capacity(asked) == 40
    verify(plan_step(ints(40, 70), replace(asked, capacity=40)), replace(asked, capacity=40))


def test_a_small_node_holds_what_offload_lets_it_hold_where_the_usual_rank_offloads_too() -> None:
    """Its memory is the limit, and with offload fewer bytes have to stay there."""
    nodes = Cluster((Node("large", 2), Node("small", 2, memory=3500)), 6000)
    asked = replace(settings(capacity=60), cluster=nodes)
    alone, helped = asked.capacities.tolist(), replace(asked, offload=PPM, host_memory=2**40).capacities.tolist()
    peaks = [int(COSTS.peak_bytes(ints(n), ints(n), PPM)[0]) for n in (helped[3], helped[3] + 1)]
    assert 0 < alone[3] < helped[3] < 60 and peaks[0] <= 3500 < peaks[1]
    fits = replace(asked, offload=PPM, host_memory=2**40, capacity=40)
    assert fits.capacities[3] == alone[3], "forty need no offload on large ranks"


def test_the_usual_memory_is_that_of_an_existing_rank() -> None:
    """If every node states its memory, the usual memory is the largest, because no rank has the cluster's."""
    nodes = (Node("a", 1, memory=device(20)), Node("b", 2, memory=device(30)))
    asked = replace(settings(capacity=30), cluster=Cluster(nodes, device(10)))
    assert asked.device_memory == device(30) and asked.capacities.tolist() == [20, 30, 30]
    assert largest_capacity(asked) == 30
    plan_step(ints(30, 30, 20), asked)
    with pytest.raises(MemoryFitError):
        plan_step(ints(30, 30, 31), replace(asked, capacity=31))
    other = replace(asked, cluster=Cluster((*nodes, Node("c", 1)), device(10)), capacity=10)
    assert other.device_memory == device(10) and other.capacities.tolist()[-1] == 10


def test_a_planner_that_needs_more_peers_is_refused() -> None:
    asked = settings("static", 8, max_peers=2)
    with refused(ConfigError, "planner.max_peers"):
        plan_step(ints(8), asked.by("naive"))


def test_the_largest_capacity_with_offload_is_more_than_without() -> None:
    full = int(COSTS.peak_bytes(ints(16), ints(16))[0])
    plain = replace(settings(device_memory=full - 1), host_memory=2**40)
    offloading = replace(plain, offload=PPM)
    most = largest_capacity(offloading)
    assert largest_capacity(plain) == 15 < most
    plan_step(ints(30, 30), replace(offloading, capacity=most))
    with pytest.raises(MemoryFitError):
        plan_step(ints(most + 1), replace(offloading, capacity=most + 1))


def test_a_capacity_that_the_device_cannot_hold_is_refused_with_both_sizes() -> None:
    full = int(COSTS.peak_bytes(ints(16), ints(16))[0])
    plan_step(ints(30, 30), settings(device_memory=full))
    with refused(MemoryFitError, "capacity") as problems:
        plan_step(ints(30, 30), settings(device_memory=full - 1))
    need, leaves = format_apart(full, full - 1)
    assert need != leaves and need in problems[0].message and leaves in problems[0].message
    plan_step(ints(30, 30), settings(device_memory=full - 1, capacity=15))


@pytest.mark.filterwarnings("error")
def test_a_model_whose_bytes_pass_64_bits_is_refused_too() -> None:
    huge = replace(COSTS, token_bytes=2**70, fixed_bytes=2**65)
    with refused(MemoryFitError, "capacity"):
        plan_step(ints(30), replace(settings(), costs=huge))


def test_model_states_that_the_host_cannot_hold_are_refused_with_both_sizes() -> None:
    asked = replace(settings(), costs=replace(COSTS, host_fixed_bytes=2**20 + 1), host_memory=-1)
    with refused(MemoryFitError, "cluster.host_memory") as problems:
        plan_step(ints(30), asked)
    assert "1.000001 MiB" in problems[0].message and "1.000000 MiB" in problems[0].message


@pytest.mark.parametrize("memory", [0, COSTS.fixed_bytes])
def test_a_device_without_memory_for_a_token_is_refused(memory: int) -> None:
    with refused(MemoryFitError, "capacity"):
        plan_step(ints(30), settings(device_memory=memory))


@pytest.mark.parametrize("mode", MODES)
def test_a_planner_that_breaks_a_rule_is_caught(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: np.ndarray, asked: object) -> StepPlan:
        return emit("broken", "free", 4, 16, step, [[(0, (0, 1))], [(1, (2,))]])

    monkeypatch.setitem(PLANNERS, "balanced", replace(PLANNERS["balanced"], plan=broken, modes=("free",)))
    with pytest.raises(PlanError) as caught:
        plan_step(ints(9, 17), settings(mode=mode))
    assert caught.value.rule == 2


def test_a_planner_that_plans_other_sequences_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_step(ints(9, 12), settings())
    other = replace(PLANNERS["balanced"], plan=lambda step, asked: replace(plan, lengths=ints(9, 11)))
    monkeypatch.setitem(PLANNERS, "balanced", other)
    with pytest.raises(PlanError) as caught:
        plan_step(ints(9, 12), settings())
    assert caught.value.rule == 0


def test_what_only_settings_decide_is_not_computed_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits without offload: from the second step on, costs give times only."""
    ours = replace(settings("adaptive", 8, 64), offload=PPM, host_memory=2**40)
    plan_step(ints(*range(1, 60)), ours)
    for name in ("peak_bytes", "working", "most_tokens"):
        monkeypatch.delattr(f"engine.cost.model.Costs.{name}")
    step = ints(*range(1, 65))
    assert plan_step(step, ours).sequence_lengths.tolist() == step.tolist()
