"""`verify` against two references: an executor in which plans finish or hang, and its rules in slow, plain Python."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from hypothesis import given

from engine.errors import PlanError
from engine.planner.make import plan_step
from engine.planner.plan import loads
from engine.planner.plan.emit import emit
from engine.planner.plan.modes import lockstep
from engine.planner.plan.order import one_f_one_b
from engine.planner.plan.step_plan import StepPlan
from engine.planner.planners import PLANNERS
from engine.planner.proof.verify import verify
from engine.planner.settings import PlanSettings
from engine.units import Ints
from tests.planner.executor import finishes
from tests.planner.pipelines import aligned_pipeline, aligned_pipelines, any_pipelines, sliced, staged
from tests.planner.proof.slow_verify import broken
from tests.planner.samples import COSTS, by_hand, settings, staged_costs


def random_rings(rng: np.random.Generator) -> StepPlan:
    """Make a good plan of random rings on random ranks."""
    ranks = int(rng.integers(2, 6))
    count = int(rng.integers(2, 8))
    rings = [rng.permutation(ranks)[: rng.integers(1, ranks + 1)].tolist() for _ in range(count)]
    groups: list[list[tuple[int, list[int]]]] = [[] for _ in range(count)]
    for sequence, group in enumerate(rng.integers(0, count, count).tolist()):
        groups[group].append((sequence, rings[sequence]))
    return emit("random", "free", ranks, 10**6, rng.integers(1, 30, count), groups)


def shuffled(plan: StepPlan, rng: np.random.Generator) -> StepPlan:
    """Shuffle micro-batches of a rank, shards of a micro-batch, or the numbers of gangs, a few times."""
    micros = [[[s.sequence for s in micro.shards] for micro in plan.of_rank(rank)] for rank in range(plan.ranks)]
    for _ in range(int(rng.integers(0, 4))):
        row = micros[int(rng.integers(plan.ranks))]
        if rng.random() < 0.7:
            rng.shuffle(row)
        else:
            rng.shuffle(row[int(rng.integers(len(row)))])
    rings = [plan.ring(sequence) for sequence in range(plan.sequences)]
    mixed = by_hand(plan.lengths.tolist(), rings, micros, plan.capacity)
    if rng.random() < 0.3:
        mixed = replace(mixed, gang=rng.permutation(int(mixed.gang.max()) + 1)[mixed.gang])
    # The marks of the plan before, as if only the order were wrong, or any marks.
    return replace(mixed, overlap=plan.overlap if rng.random() < 0.7 else rng.integers(0, 2, plan.ranks))


@pytest.mark.long
@pytest.mark.parametrize("plans", [700, pytest.param(1500, marks=pytest.mark.slow)])
def test_every_plan_that_hangs_is_refused(plans: int) -> None:
    seen = {(accepted, finished): 0 for accepted in (True, False) for finished in (True, False)}
    rules = set()
    for seed in range(plans):
        rng = np.random.default_rng(seed)
        plan = shuffled(random_rings(rng), rng)
        try:
            verify(plan, settings(ranks=plan.ranks, capacity=plan.capacity))
            accepted = True
        except PlanError as error:
            accepted = False
            rules.add(error.rule)
        finished = finishes(plan)
        assert finished or not accepted, f"seed {seed}: an accepted plan does not finish"
        assert not accepted or finishes(plan, blocking=False), f"seed {seed}: nor where reductions wait for nothing"
        seen[accepted, finished] += 1
    assert min(seen[True, True], seen[False, False]) > plans // 6, seen
    assert {4, 6} <= rules


def planned(rng: np.random.Generator) -> tuple[StepPlan, PlanSettings]:
    """Make a step of a random planner, world and capacity, with long sequences or without."""
    ranks, capacity = int(rng.integers(1, 9)), int(rng.integers(4, 33))
    asked = settings(str(rng.choice([*PLANNERS])), ranks, capacity, max_peers=8)
    longest = ranks * capacity if rng.random() < 0.7 else capacity
    lengths = 1 + (longest * rng.random(int(rng.integers(1, 25))) ** 3).astype(np.int64)
    return plan_step(np.minimum(lengths, asked.context), asked), asked


def ending_with_a_ring(plan: StepPlan, rng: np.random.Generator) -> StepPlan | None:
    """The plan in which a marked rank runs its last ring last and keeps its mark; None if no marked rank has a ring."""
    rows = [list(plan.of_rank(rank)) for rank in range(plan.ranks)]
    rings = [[micro for micro in row if any(shard.degree > 1 for shard in micro.shards)] for row in rows]
    chosen = [rank for rank in range(plan.ranks) if plan.overlaps(rank) and rings[rank]]
    if not chosen:
        return None
    rank = int(rng.choice(chosen))
    rows[rank].remove(rings[rank][-1])
    rows[rank].append(rings[rank][-1])
    micros = [[[shard.sequence for shard in micro.shards] for micro in row] for row in rows]
    mixed = by_hand(plan.lengths.tolist(), [plan.ring(at) for at in range(plan.slices)], micros, plan.capacity)
    return replace(mixed, overlap=plan.overlap)


@pytest.mark.long
@pytest.mark.parametrize("plans", [400, pytest.param(2400, marks=pytest.mark.slow)])
def test_no_plan_hangs_in_reductions_and_one_whose_marks_are_wrong_does(plans: int) -> None:
    """Those with a wrong mark, or with a ring after the micro-batch that must be last, are refused, whether the ranks
    of the ring happen to meet in the reductions or not."""
    seen: Counter[str] = Counter()
    for seed in range(plans):
        rng = np.random.default_rng(seed)
        plan, asked = planned(rng)
        assert finishes(plan) and finishes(plan, blocking=False), f"seed {seed}"
        last = [[*plan.of_rank(rank)][-1] for rank in range(plan.ranks)]
        unsplit = [all(shard.degree == 1 for shard in micro.shards) for micro in last]
        assert plan.overlap.tolist() == [int(one) for one in unsplit], f"seed {seed}"
        seen["all marked" if all(unsplit) else "some marked" if any(unsplit) else "none marked"] += 1
        broken_plans = {"order": ending_with_a_ring(plan, rng)}
        if not all(unsplit):
            wrong = plan.overlap.copy()
            wrong[int(rng.choice(np.flatnonzero(plan.overlap == 0)))] = 1
            broken_plans["mark"] = replace(plan, overlap=wrong)
        for kind, wrong_plan in broken_plans.items():
            if wrong_plan is None:
                continue
            with pytest.raises(PlanError) as caught:
                verify(wrong_plan, asked)
            assert caught.value.rule == 4, f"seed {seed}: {kind}"
            seen[f"{kind} hangs" if not finishes(wrong_plan) else f"{kind} is refused"] += 1
    print(dict(seen))
    kinds = ("all marked", "some marked", "none marked", "order hangs", "mark hangs")
    assert min(seen[kind] for kind in kinds) > plans // 40, seen


@pytest.mark.long
@pytest.mark.parametrize("examples", [300, pytest.param(2500, marks=pytest.mark.slow)])
def test_a_pipeline_is_accepted_exactly_if_it_finishes(examples: int) -> None:
    """With slices, teams, unequal counts of micro-batches, and orders of any kind."""
    seen: Counter[tuple[bool, bool, bool]] = Counter()

    @hypothesis.settings(max_examples=examples, derandomize=True)  # the counts below are those of these examples
    @given(any_pipelines())
    def check(plan: StepPlan) -> None:
        asked = settings(ranks=plan.ranks, capacity=plan.capacity, mode="pipeline", stages=plan.stages, max_peers=9)
        try:
            verify(plan, asked)
            accepted = True
        except PlanError as error:
            assert error.rule == 4
            accepted = False
        assert finishes(plan) == accepted
        in_1f1b = np.array_equal(plan.passes, one_f_one_b(len(plan.passes) // (2 * plan.stages), plan.stages))
        seen[accepted, plan.slices > plan.sequences, in_1f1b] += 1

    check()
    kinds = [(accepted, sliced, False) for accepted in (True, False) for sliced in (True, False)]
    assert min(seen[kind] for kind in [*kinds, (True, False, True)]) >= examples // 100, seen
    assert seen[False, False, True] >= examples // 500, seen


@given(aligned_pipelines)
def test_a_pipeline_finishes_if_each_gang_has_one_place_on_all_its_ranks(plan: StepPlan) -> None:
    verify(plan, settings(ranks=plan.ranks, capacity=plan.capacity, mode="pipeline", stages=plan.stages))
    assert finishes(plan)


def test_unequal_counts_may_deadlock_a_pipeline_but_not_free_ranks() -> None:
    """Rank 0 runs a micro-batch between two rings, and rank 1 does not: in 1F1B order they wait for each other."""
    plan = by_hand([8, 8, 8], [(0, 1), (0,), (0, 1)], [[[0], [1], [2]], [[0], [2]]])
    verify(plan, settings(ranks=2))
    assert finishes(plan)
    piped = staged(plan, 2)
    with pytest.raises(PlanError) as caught:
        verify(piped, settings(ranks=2, mode="pipeline", stages=2))
    assert caught.value.rule == 4 and not finishes(piped)


def meaning(plan: StepPlan) -> object:
    """Return all that a plan makes ranks do: everything except the numbers of gangs."""
    ranks = [[replace(micro, gang=0) for micro in plan.of_rank(rank)] for rank in range(plan.ranks)]
    members = [frozenset(np.flatnonzero(plan.gang == gang).tolist()) for gang in plan.gang.tolist()]
    return plan.mode, plan.stages, plan.ranks, plan.capacity, ranks, members, plan.overlap.tolist()


def changed(array: Ints, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Return the array after a change of one kind; most new values are plausible ones."""
    array, at, other = array.copy(), int(rng.integers(len(array))), int(rng.integers(len(array)))
    value = int(rng.choice([array[other], array[at] + 1, array[at] - 1, rng.integers(-2, 20)]))
    if kind == "an entry":
        array[at] = value
    elif kind == "a swap":
        array[[at, other]] = array[[other, at]]
    elif kind == "a huge entry":
        array[at] = rng.choice([2**63 - 1, -(2**63), 2**62, 2**35, 2**31, -1])
    elif kind == "fewer":
        array = array[: int(rng.integers(len(array)))]
    elif kind == "more":
        array = np.append(array, value)
    elif kind == "type":
        array = array.astype(rng.choice(["f8", "i4", "u8", ">i8", "?", "O"]))
    else:
        array = array.reshape(-1, 1)
    return array


def verified(rng: np.random.Generator) -> tuple[StepPlan, PlanSettings]:
    """Return a plan of any mode, with offload, and the tightest settings that accept it."""
    plan = random_rings(rng)
    if rng.random() < 0.3:
        plan = aligned_pipeline(rng)
        if rng.random() < 0.5:
            plan = sliced(plan, int(rng.integers(1, 4)), plan.stages, int(rng.integers(2**31)))
    plan = replace(plan, capacity=40, offload=rng.choice([0, 250_000, 500_000], plan.micro_batches))
    if plan.mode == "free" and rng.random() < 0.5:
        plan = lockstep(plan)
    tokens, buffers = loads.micro_loads(plan)
    costs = staged_costs(plan.stages, replace(COSTS, slice_kv_bytes=7, slice_dkv_bytes=13, team_bytes=11))
    held = loads.in_flight(plan, costs) if plan.mode == "pipeline" else None
    peak = int(costs.peak_bytes(tokens, buffers, plan.offload, waiting=held and list(held.tokens)).max())
    host = int((loads.host_bytes(plan, costs, held) if held else costs.host_bytes(tokens, plan.offload)).max())
    capacity = int(COSTS.resident(tokens, plan.offload).max())
    asked = settings(ranks=plan.ranks, capacity=capacity, mode=plan.mode, device_memory=peak, stages=plan.stages)
    asked = replace(asked, costs=costs, offload=500_000, host_memory=host, max_peers=int(loads.peers(plan).max()))
    return replace(plan, capacity=capacity), asked


LIMITS = ("device memory", "host memory", "capacity", "peers")


def one_less(plan: StepPlan, asked: PlanSettings, limit: str) -> tuple[StepPlan, PlanSettings]:
    """The plan under settings with one limit lower by one: a byte, a token or a peer.

    The host's memory is a limit only for plans that offload; for others that of the device takes its place.
    """
    if limit == "device memory" or (limit == "host memory" and not asked.host_memory):
        cluster = replace(asked.cluster, device_memory=asked.cluster.device_memory - 1)
        return plan, replace(asked, cluster=cluster)
    if limit == "host memory":
        return plan, replace(asked, host_memory=asked.host_memory - 1)
    if limit == "capacity":
        return replace(plan, capacity=plan.capacity - 1), replace(asked, capacity=asked.capacity - 1)
    return plan, replace(asked, max_peers=asked.max_peers - 1)


KINDS = ("an entry", "a swap", "a huge entry", "fewer", "more", "type", "shape")


@pytest.mark.long
@pytest.mark.parametrize("plans", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_damaged_plan_is_refused_exactly_if_the_slow_reference_refuses_it(plans: int) -> None:
    """And by the same rule. So is a plan that needs one byte, token or peer more than its settings allow.

    A damaged plan that passes is a valid plan. Either it is the same plan with other numbers for gangs, or another one:
    with other lengths (which `plan_step` notices), other offload ratios that fit, or unsplit sequences in another order
    or micro-batch.
    """
    passed: Counter[tuple[str, str, bool]] = Counter()
    rules: Counter[int | None] = Counter()
    for seed in range(plans):
        rng = np.random.default_rng(seed)
        plan, asked = verified(rng)
        assert broken(plan, asked) is None
        verify(plan, asked)
        tight = one_less(plan, asked, LIMITS[seed % len(LIMITS)])
        with pytest.raises(PlanError) as caught:
            verify(*tight)
        assert caught.value.rule == broken(*tight)
        names = [name for name, array in plan.arrays().items() if len(array)]
        name, kind = str(rng.choice(names)), str(rng.choice(KINDS, p=[0.4, 0.35, *[0.05] * 5]))
        damaged = replace(plan, **{name: changed(plan.arrays()[name], kind, rng)})
        rule = broken(damaged, asked)
        rules[rule] += 1
        try:
            verify(damaged, asked)
        except PlanError as error:
            assert error.rule == rule, f"seed {seed}: {kind} of {name}: {error}"
            continue
        assert rule is None, f"seed {seed}: {kind} of {name}"
        assert finishes(damaged), f"seed {seed}: an accepted plan does not finish"
        if damaged.digest != plan.digest:
            passed[name, kind, meaning(damaged) == meaning(plan)] += 1
    # Two passes of different stages may change places without a change for any device.
    assert all(same == (name == "gang") for name, _, same in passed if name != "passes"), passed
    assert {kind for _, kind, _ in passed} == {"an entry", "a swap"} and "slot" not in {name for name, _, _ in passed}
    assert rules[None] < plans // 2 and min(rules[rule] for rule in (0, 1, 2, 3)) > plans // 100, rules
