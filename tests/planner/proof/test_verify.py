"""Each rule refuses plans that break it, and no plan that an executor finds to hang is accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.errors import PlanError
from engine.planner.plan.emit import Placement, build, emit
from engine.planner.plan.modes import lockstep
from engine.planner.plan.step_plan import StepPlan
from engine.planner.proof.verify import duplicate_in_row, verify
from tests.planner.executor import finishes
from tests.planner.samples import COSTS, by_hand, ints, settings, staged_costs

SETTINGS = settings(ranks=3, capacity=16)


def good() -> StepPlan:
    """Two rings and two short sequences on three ranks; rank 2 runs three micro-batches."""
    groups = [[(0, (0, 1)), (1, (2,))], [(2, (1, 2))], [(3, (2,))]]
    return emit("by hand", "free", 3, 16, ints(20, 5, 7, 3), groups)


def changed(name: str, at: int, value: int) -> StepPlan:
    """Return the good plan after a change of one number."""
    plan = good()
    array = getattr(plan, name).copy()
    array[at] = value
    return replace(plan, **{name: array})


def shortened(name: str) -> StepPlan:
    plan = good()
    return replace(plan, **{name: getattr(plan, name)[:-1]})


def slots(name: str, at: int, value: int) -> StepPlan:
    """Return the good plan in lockstep mode after a change of one number."""
    plan = lockstep(good())
    array = getattr(plan, name).copy()
    array[at] = value
    return replace(plan, **{name: array})


def unequal_slots() -> StepPlan:
    """Lockstep mode over the free plan, in which ranks have 1, 2 and 3 micro-batches."""
    plan = good()
    counts = np.diff(plan.micro_start)
    slot = np.concatenate([np.arange(count) for count in counts])
    return replace(plan, mode="lockstep", slot=slot, overlap=ints(0, 0, 0))


def gang_in_two_slots() -> StepPlan:
    """A ring in slot 0 of one rank and in slot 1 of the other."""
    plan = by_hand([8, 1, 1], [(0, 1), (0,), (1,)], [[[0], [1]], [[2], [0]]])
    return replace(plan, mode="lockstep", slot=ints(0, 1, 0, 1))


def two_in_a_gang() -> StepPlan:
    """Three rings in a triangle; ranks 1 and 2 run their two together, rank 0 one after the other."""
    return by_hand([6, 6, 6], [(0, 1), (1, 2), (2, 0)], [[[0], [2]], [[0, 1]], [[1, 2]]])


def twice_in_a_ring() -> StepPlan:
    return build("by hand", "free", 3, 16, Placement(ints(9), ints(0), ints(0, 4), ints(0, 1, 2, 1)))


def cycle(ranks: int) -> StepPlan:
    """Rank r runs ring r, then ring r - 1, shared with its neighbours: each rank waits for the next one."""
    rings = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    return by_hand([8] * ranks, rings, [[[rank], [(rank - 1) % ranks]] for rank in range(ranks)])


def crossed_passes() -> StepPlan:
    """Two rings over the same two ranks, in opposite order."""
    return by_hand([8, 8], [(0, 1), (1, 0)], [[[0], [1]], [[1], [0]]])


def pipeline(**more: object) -> StepPlan:
    """Two slices on a ring of two ranks, and a sequence of rank 0, through two stages: F0 F1 F2 B1 B0 B2 on each."""
    plan = by_hand([8, 6, 5], [(0, 1), (0, 1), (0,)], [[[0], [1], [2]], [[0], [1]]])
    passes = ints(0, 2, 4, 6, 8, 10, 7, 5, 3, 1, 11, 9)
    values: dict[str, object] = {"before": ints(0, 8, 0), "passes": passes, "mode": "pipeline", "stages": 2}
    return replace(plan, **values | more)


def sliced(**more: object) -> StepPlan:
    """The pipeline in one stage, as verified with the settings of free mode: its slices cannot wait for each other."""
    return replace(pipeline(), mode="free", stages=1, passes=ints(), **more)


def crossed_shards() -> StepPlan:
    """Two rings in one micro-batch of each of two ranks, which list them in opposite order."""
    return by_hand([8, 8], [(0, 1), (0, 1)], [[[0, 1]], [[1, 0]]])


def crossed_mates() -> StepPlan:
    """Two rings in one team each: between two ranks their messages go to the next mate in one ring, and to the one
    after it in the other. One rank lists the rings in the opposite order."""
    plan = by_hand([32, 32], [(0, 1, 2, 3), (0, 2, 1, 3)], [[[0, 1]], [[1, 0]], [[0, 1]], [[0, 1]]])
    return replace(plan, team=ints(4, 4))


BROKEN: list[tuple[int, str, Callable[[], StepPlan]]] = [
    (0, "mode", lambda: replace(good(), mode="pipeline")),
    (0, "ranks", lambda: replace(good(), ranks=4)),
    (0, "capacity", lambda: replace(good(), capacity=17)),
    (0, "stages", lambda: replace(good(), stages=2)),
    (0, "no sequence", lambda: replace(good(), lengths=ints(), ring_start=ints(0))),
    (0, "lengths are floats", lambda: replace(good(), lengths=good().lengths.astype(float))),
    (0, "a length of zero", lambda: changed("lengths", 1, 0)),
    (0, "a ring of no rank", lambda: changed("ring_start", 1, 0)),
    (0, "rows that go backward", lambda: changed("shard_start", 2, 5)),
    (0, "rows that start late", lambda: changed("ring_start", 0, 1)),
    (0, "a rank without a micro-batch", lambda: changed("micro_start", 1, 0)),
    (0, "a rank out of the world", lambda: changed("ring_ranks", 0, 3)),
    (0, "a negative rank", lambda: changed("ring_ranks", 0, -1)),
    (0, "a shard that does not exist", lambda: changed("shard_order", 0, 6)),
    (0, "a gang out of range", lambda: changed("gang", 0, 99)),
    (0, "a slot out of range", lambda: changed("slot", 0, 99)),
    (0, "an offload ratio above the limit", lambda: changed("offload", 0, 1)),
    (0, "a negative ratio", lambda: changed("offload", 0, -1)),
    (0, "a length beyond the limit of a step", lambda: changed("lengths", 1, 2**35)),
    (0, "lengths that together exceed the limit of a step", lambda: replace(good(), lengths=np.full(4, 2**34))),
    (0, "rows that overflow", lambda: changed("shard_start", 2, -(2**63))),
    *[(0, f"short {name}", lambda name=name: shortened(name)) for name, array in good().arrays().items() if len(array)],
    (0, "a mark that is no bit", lambda: changed("overlap", 0, 2)),
    (0, "a slice that starts before its sequence", lambda: changed("before", 1, -1)),
    (0, "a team of no rank", lambda: changed("team", 0, 0)),
    (0, "teams that do not divide their ring", lambda: changed("team", 0, 3)),
    (0, "passes without a pipeline", lambda: replace(good(), passes=ints(0, 1))),
    (1, "a slice with a gap before it", lambda: sliced(before=ints(0, 7, 0))),
    (1, "a slice of nothing before it", lambda: sliced(before=ints(3, 0, 0))),
    (4, "slices without a pipeline, whose backward passes follow at once", sliced),
    (1, "a shard in two micro-batches, another in none", lambda: changed("shard_order", 0, 1)),
    (1, "a shard on another rank than its ring says", lambda: changed("ring_ranks", 2, 0)),
    (2, "a micro-batch above the capacity", lambda: changed("lengths", 3, 17)),
    (2, "a shard above the capacity", lambda: changed("lengths", 0, 33)),
    (3, "a rank twice in a ring", twice_in_a_ring),
    (3, "a ring over two gangs", lambda: changed("gang", 0, 3)),
    (3, "a gang whose micro-batches no ring connects", lambda: changed("gang", 5, int(good().gang[3]))),
    (3, "two micro-batches of a rank in a gang", two_in_a_gang),
    (4, "two ranks that wait for each other", crossed_passes),
    (4, "three ranks that wait in a circle", lambda: cycle(3)),
    (4, "a reduction within a ring", lambda: changed("overlap", 1, 1)),
    (4, "a reduction within a slot", lambda: slots("overlap", 0, 1)),
    (5, "a slot in free mode", lambda: changed("slot", 1, 0)),
    (5, "unequal numbers of slots", unequal_slots),
    (5, "slots out of order", lambda: slots("slot", 0, 1)),
    (5, "a gang in two slots", gang_in_two_slots),
    (6, "two members that list their rings in different order", crossed_shards),
    (6, "two mates that list their rings in different order", crossed_mates),
]


def refused(plan: StepPlan, mode: str, ranks: int = 3) -> int:
    with pytest.raises(PlanError) as caught:
        verify(plan, settings(ranks=ranks, capacity=16, mode=mode))
    return caught.value.rule


def test_the_plan_that_the_cases_start_from_is_good() -> None:
    verify(good(), SETTINGS)
    verify(lockstep(good()), settings(ranks=3, capacity=16, mode="lockstep"))
    assert finishes(good()) and finishes(lockstep(good()))


@pytest.mark.parametrize(("rule", "make"), [pytest.param(r, m, id=f"{r}: {what}") for r, what, m in BROKEN])
def test_a_broken_plan_is_refused_with_the_rule_that_it_breaks(rule: int, make: Callable[[], StepPlan]) -> None:
    plan = make()
    mode = plan.mode if plan.mode == "lockstep" else "free"
    ranks = 3 if rule == 0 and plan.ranks > 3 else plan.ranks  # one plan has a wrong number
    assert refused(plan, mode, ranks) == rule


STAGED: list[tuple[int, str, dict[str, object]]] = [
    (0, "a pass twice", {"passes": ints(0, 2, 4, 6, 8, 10, 7, 5, 3, 1, 11, 11)}),
    (0, "a pass of no micro-batch", {"passes": ints(0, 2, 4, 6, 8, 10, 7, 5, 3, 1, 11, 12)}),
    (3, "a slice on another ring", {"ring_ranks": ints(0, 1, 1, 0, 0), "shard_order": ints(0, 3, 4, 1, 2)}),
    (4, "a slice that runs forward too early", {"passes": ints(4, 6, 0, 2, 8, 10, 7, 5, 3, 1, 11, 9)}),
    (4, "a slice that runs backward too late", {"passes": ints(0, 2, 4, 6, 8, 10, 3, 1, 7, 5, 11, 9)}),
    (4, "a pass before the one whose result it needs", {"passes": ints(2, 0, 4, 6, 8, 10, 7, 5, 3, 1, 11, 9)}),
]


@pytest.mark.parametrize(("rule", "name", "change"), STAGED)
def test_a_broken_pipeline_is_refused_with_the_rule_that_it_breaks(
    rule: int, name: str, change: dict[str, object]
) -> None:
    asked = settings(ranks=2, mode="pipeline", stages=2)
    verify(pipeline(), asked)
    assert finishes(pipeline())
    with pytest.raises(PlanError) as caught:
        verify(pipeline(**change), asked)
    assert caught.value.rule == rule
    assert rule != 4 or not finishes(pipeline(**change))


def test_micro_batches_in_flight_must_fit_together() -> None:
    """At the first backward pass, that of 3 tokens, rank 0 holds 4 + 5 others. K,V of the first slice, of 4 tokens, and
    their gradients count as 1 + 2 tokens.

    Its ring of two, whose calls have one round of four, counts with a quarter of 4 + 3 tokens.
    """
    costs = staged_costs(2, replace(COSTS, slice_kv_bytes=10, slice_dkv_bytes=30))
    needs = 1000 + 100 * (3 + 4 + 5 + 1 + 2) + (40 + 6 * 3) + 5 * 2
    for spare, fits in ((0, True), (-1, False)):
        own = replace(settings(ranks=2, mode="pipeline", stages=2, device_memory=needs + spare), costs=costs)
        if fits:
            verify(pipeline(), own)
        else:
            with pytest.raises(PlanError) as caught:
                verify(pipeline(), own)
            assert caught.value.rule == 2


@pytest.mark.parametrize(
    "plan", [crossed_passes(), cycle(3), cycle(5), crossed_shards(), crossed_mates(), unequal_slots()]
)
def test_plans_that_the_rules_refuse_as_stuck_do_hang(plan: StepPlan) -> None:
    """The executor agrees with the rules; else it could not judge the random plans."""
    assert not finishes(plan)


def test_rule_2_counts_bytes() -> None:
    """`good` needs 1000 + 500 + 10 tokens x 10 + 5 x (10 + 4) bytes at most, at 100 bytes a saved token."""
    peak = 1000 + 14 * 100 + 14 * 10 + 14 * 5
    plan = by_hand([20, 8], [(0, 1), (1, 0)], [[[0, 1]], [[0, 1]]])
    verify(plan, settings(ranks=2, device_memory=peak))
    with pytest.raises(PlanError) as caught:
        verify(plan, settings(ranks=2, device_memory=peak - 1))
    assert caught.value.rule == 2


def test_rule_0_allows_stages_in_pipelines_only() -> None:
    with pytest.raises(PlanError) as caught:
        verify(replace(good(), stages=2), replace(SETTINGS, stages=2))
    assert caught.value.rule == 0


def test_rule_2_counts_the_activations_that_stay_on_the_device() -> None:
    """Of 20 tokens in 4 layers, of which 2 are never offloaded, 16 stay at a ratio of 0.4: 20 x (2 + 0.6 x 2) / 4."""
    groups = [[(0, (0,))]]
    asked = replace(settings(ranks=1), offload=500_000, host_memory=400)
    verify(emit("by hand", "free", 1, 16, ints(20), groups, offload=ints(400_000)), asked)
    with pytest.raises(PlanError) as caught:
        verify(emit("by hand", "free", 1, 16, ints(20), groups, offload=ints(399_999)), asked)
    assert caught.value.rule == 2


def test_rule_2_counts_the_bytes_on_the_host() -> None:
    plan = emit("by hand", "free", 1, 16, ints(20), [[(0, (0,))]], offload=ints(400_000))
    with pytest.raises(PlanError) as caught:
        verify(plan, replace(settings(ranks=1), offload=500_000, host_memory=399))
    assert caught.value.rule == 2


def test_rule_2_uses_the_capacity_of_each_rank() -> None:
    """Beyond 1000 bytes of model states, rank 1 has half of the memory of rank 0."""
    cluster = Cluster((Node("large", 1), Node("small", 1, memory=2000)), device_memory=3000)
    asked = replace(settings(ranks=2), cluster=cluster)
    verify(emit("by hand", "free", 2, 16, ints(16, 8), [[(0, (0,)), (1, (1,))]]), asked)
    with pytest.raises(PlanError) as caught:
        verify(emit("by hand", "free", 2, 16, ints(16, 9), [[(0, (0,)), (1, (1,))]]), asked)
    assert caught.value.rule == 2


def test_rule_5_allows_no_slots_in_a_pipeline() -> None:
    plan = emit("by hand", "pipeline", 1, 16, ints(9), [[(0, (0,))]], stages=2)
    asked = settings(ranks=1, mode="pipeline", stages=2)
    verify(plan, asked)
    with pytest.raises(PlanError) as caught:
        verify(replace(plan, slot=ints(0)), asked)
    assert caught.value.rule == 5


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=8))
def test_the_first_duplicate_in_a_row_is_found(rows: list[list[int]]) -> None:
    values = [value for row in rows for value in row]
    again = [value in row[:place] for row in rows for place, value in enumerate(row)]
    expected = again.index(True) if any(again) else -1
    assert duplicate_in_row(np.cumsum([0, *map(len, rows)]), ints(*values), 5) == expected


def test_rule_7_bounds_the_peers() -> None:
    plan = by_hand([9], [(0, 1, 2)], [[[0]], [[0]], [[0]]])
    verify(plan, settings(ranks=3, max_peers=2))
    with pytest.raises(PlanError) as caught:
        verify(plan, settings(ranks=3, max_peers=1))
    assert caught.value.rule == 7


def test_gang_numbers_may_disagree_with_the_order_of_ranks() -> None:
    """Gang numbers are names: if an order exists, it is found for any numbering."""
    plan = by_hand([8, 8, 3], [(0, 1), (1, 2), (0,)], [[[2], [0]], [[0], [1]], [[1]]])
    names = ints(2, 1, 1, 0, 0)
    shuffled = replace(plan, gang=names)
    verify(shuffled, SETTINGS)
    assert finishes(shuffled)
