"""Each rule refuses plans that break it; and no plan that would hang is accepted, by the judgement of an executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from engine.errors import PlanError
from engine.planner.emit import build, emit
from engine.planner.lockstep import lockstep
from engine.planner.plan import StepPlan
from engine.planner.verify import verify
from tests.planner.executor import finishes
from tests.planner.samples import by_hand, ints, settings

SETTINGS = settings(ranks=3, capacity=16)


def good() -> StepPlan:
    """Two rings and two short sequences on three ranks; rank 2 runs three micro-batches."""
    groups = [[(0, (0, 1)), (1, (2,))], [(2, (1, 2))], [(3, (2,))]]
    return emit("by hand", "free", 3, 16, ints(20, 5, 7, 3), groups)


def changed(name: str, at: int, value: int) -> StepPlan:
    """Return the good plan with one number changed."""
    plan = good()
    array = getattr(plan, name).copy()
    array[at] = value
    return replace(plan, **{name: array})


def shortened(name: str) -> StepPlan:
    plan = good()
    return replace(plan, **{name: getattr(plan, name)[:-1]})


def slots(name: str, at: int, value: int) -> StepPlan:
    """Return the good plan in lockstep, with one number changed."""
    plan = lockstep(good())
    array = getattr(plan, name).copy()
    array[at] = value
    return replace(plan, **{name: array})


def unequal_slots() -> StepPlan:
    """Lockstep mode over the free plan, in which ranks have 1, 2 and 3 micro-batches."""
    plan = good()
    counts = np.diff(plan.micro_start)
    return replace(plan, mode="lockstep", slot=np.concatenate([np.arange(count) for count in counts]))


def gang_in_two_slots() -> StepPlan:
    """A ring in slot 0 of one rank and in slot 1 of the other."""
    plan = by_hand([8, 1, 1], [(0, 1), (0,), (1,)], [[[0], [1]], [[2], [0]]])
    return replace(plan, mode="lockstep", slot=ints(0, 1, 0, 1))


def two_in_a_gang() -> StepPlan:
    """Three rings in a triangle; ranks 1 and 2 run theirs together, rank 0 one after the other."""
    return by_hand([6, 6, 6], [(0, 1), (1, 2), (2, 0)], [[[0], [2]], [[0, 1]], [[1, 2]]])


def twice_in_a_ring() -> StepPlan:
    return build("by hand", "free", 3, 16, ints(9), ints(0), ints(0, 4), ints(0, 1, 2, 1))


def cycle(ranks: int) -> StepPlan:
    """Rank r runs ring r, then ring r - 1, and shares them with its neighbours: each waits for the next."""
    rings = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    return by_hand([8] * ranks, rings, [[[rank], [(rank - 1) % ranks]] for rank in range(ranks)])


def crossed_passes() -> StepPlan:
    """Two rings over the same two ranks, in opposite order."""
    return by_hand([8, 8], [(0, 1), (1, 0)], [[[0], [1]], [[1], [0]]])


def crossed_shards() -> StepPlan:
    """Two rings in one micro-batch of each of two ranks, which list them in opposite order."""
    return by_hand([8, 8], [(0, 1), (0, 1)], [[[0, 1]], [[1, 0]]])


BROKEN: list[tuple[int, str, Callable[[], StepPlan]]] = [
    (0, "mode", lambda: replace(good(), mode="pipeline")),
    (0, "ranks", lambda: replace(good(), ranks=4)),
    (0, "capacity", lambda: replace(good(), capacity=17)),
    (0, "no sequence", lambda: replace(good(), lengths=ints(), ring_start=ints(0))),
    (0, "lengths are floats", lambda: replace(good(), lengths=good().lengths.astype(float))),
    (0, "a length of zero", lambda: changed("lengths", 1, 0)),
    (0, "a ring of no rank", lambda: changed("ring_start", 1, 0)),
    (0, "rows that go backward", lambda: changed("shard_start", 2, 5)),
    (0, "rows that start late", lambda: changed("ring_start", 0, 1)),
    (0, "a rank without a micro-batch", lambda: changed("micro_start", 1, 0)),
    (0, "a rank out of the world", lambda: changed("ring_ranks", 0, 3)),
    (0, "a negative rank", lambda: changed("ring_ranks", 0, -1)),
    (0, "a shard that is none", lambda: changed("shard_order", 0, 6)),
    (0, "a gang out of range", lambda: changed("gang", 0, 99)),
    (0, "a slot out of range", lambda: changed("slot", 0, 99)),
    *[(0, f"short {name}", lambda name=name: shortened(name)) for name in good().arrays()],
    (1, "a shard in two micro-batches, another in none", lambda: changed("shard_order", 0, 1)),
    (1, "a shard on a rank that is not its own", lambda: changed("ring_ranks", 2, 0)),
    (2, "a micro-batch above the capacity", lambda: changed("lengths", 3, 17)),
    (2, "a shard above the capacity", lambda: changed("lengths", 0, 33)),
    (3, "a rank twice in a ring", twice_in_a_ring),
    (3, "a ring over two gangs", lambda: changed("gang", 0, 3)),
    (3, "a gang that no ring connects", lambda: changed("gang", 5, int(good().gang[3]))),
    (3, "two micro-batches of a rank in a gang", two_in_a_gang),
    (4, "two ranks that wait for each other", crossed_passes),
    (4, "three ranks that wait in a circle", lambda: cycle(3)),
    (5, "a slot in free mode", lambda: changed("slot", 1, 0)),
    (5, "unequal numbers of slots", unequal_slots),
    (5, "slots out of order", lambda: slots("slot", 0, 1)),
    (5, "a gang in two slots", gang_in_two_slots),
    (6, "two members that list their rings in another order", crossed_shards),
]


def refused(plan: StepPlan, mode: str, ranks: int = 3) -> int:
    with pytest.raises(PlanError) as caught:
        verify(plan, settings(ranks=ranks, capacity=16, mode=mode))
    return caught.value.rule


def test_the_plan_that_is_broken_below_is_good() -> None:
    verify(good(), SETTINGS)
    verify(lockstep(good()), settings(ranks=3, capacity=16, mode="lockstep"))
    assert finishes(good()) and finishes(lockstep(good()))


@pytest.mark.parametrize(("rule", "make"), [pytest.param(r, m, id=f"{r}: {what}") for r, what, m in BROKEN])
def test_a_broken_plan_is_refused_with_the_rule_that_it_breaks(rule: int, make: Callable[[], StepPlan]) -> None:
    plan = make()
    mode = plan.mode if plan.mode == "lockstep" else "free"
    ranks = 2 if plan.ranks == 2 else 3
    assert refused(plan, mode, ranks) == rule


@pytest.mark.parametrize("plan", [crossed_passes(), cycle(3), cycle(5), crossed_shards(), unequal_slots()])
def test_plans_that_the_rules_call_stuck_are_stuck(plan: StepPlan) -> None:
    """The executor agrees; else it could not judge the random plans."""
    assert not finishes(plan)


def test_rule_2_counts_bytes() -> None:
    """`good` needs 1000 + 500 + 10 tokens x 10 + 5 x (10 + 4) bytes at most, at 100 bytes a saved token."""
    peak = 1000 + 14 * 100 + 14 * 10 + 14 * 5
    plan = by_hand([20, 8], [(0, 1), (1, 0)], [[[0, 1]], [[0, 1]]])
    verify(plan, settings(ranks=2, device_memory=peak))
    with pytest.raises(PlanError, match=f"rank 0 needs {peak} bytes") as caught:
        verify(plan, settings(ranks=2, device_memory=peak - 1))
    assert caught.value.rule == 2


def test_rule_7_bounds_the_peers() -> None:
    plan = by_hand([9], [(0, 1, 2)], [[[0]], [[0]], [[0]]])
    verify(plan, settings(ranks=3, max_peers=2))
    with pytest.raises(PlanError, match="rank 0 has 2 peers, above 1") as caught:
        verify(plan, settings(ranks=3, max_peers=1))
    assert caught.value.rule == 7


def test_gang_numbers_may_disagree_with_the_order_of_ranks() -> None:
    """They are names: an order that exists is found, whatever the names are."""
    plan = by_hand([8, 8, 3], [(0, 1), (1, 2), (0,)], [[[2], [0]], [[0], [1]], [[1]]])
    names = ints(2, 1, 1, 0, 0)
    shuffled = replace(plan, gang=names)
    verify(shuffled, SETTINGS)
    assert finishes(shuffled)


def random_rings(rng: np.random.Generator) -> StepPlan:
    """Return a good plan of random rings on random ranks."""
    ranks = int(rng.integers(2, 6))
    count = int(rng.integers(2, 8))
    rings = [rng.permutation(ranks)[: rng.integers(1, ranks + 1)].tolist() for _ in range(count)]
    groups: list[list[tuple[int, list[int]]]] = [[] for _ in range(count)]
    for sequence, group in enumerate(rng.integers(0, count, count).tolist()):
        groups[group].append((sequence, rings[sequence]))
    return emit("random", "free", ranks, 10**6, rng.integers(1, 30, count), groups)


def shuffled(plan: StepPlan, rng: np.random.Generator) -> StepPlan:
    """Return the plan after some swaps: of micro-batches of a rank, of shards of a micro-batch, or of gangs' names."""
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
    return mixed


def test_accepted_plans_finish_and_refused_ones_include_all_that_do_not() -> None:
    seen = {(accepted, finished): 0 for accepted in (True, False) for finished in (True, False)}
    rules = set()
    for seed in range(1500):
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
        seen[accepted, finished] += 1
    assert seen[True, True] > 300 and seen[False, False] > 300, seen
    assert {4, 6} <= rules


def test_one_wrong_number_is_refused_in_plain_words_or_does_no_harm() -> None:
    """`verify` itself never stumbles over a damaged plan, and what it lets through still finishes."""
    accepted = 0
    for seed in range(3000):
        rng = np.random.default_rng(seed)
        plan = random_rings(rng) if seed % 2 else lockstep(random_rings(rng))
        name = str(rng.choice(list(plan.arrays())))
        array = getattr(plan, name).copy()
        array[rng.integers(len(array))] = rng.integers(-2, len(plan.ring_ranks) + 3)
        damaged = replace(plan, **{name: array})
        try:
            verify(damaged, settings(ranks=plan.ranks, capacity=plan.capacity, mode=plan.mode))
        except PlanError:
            continue
        accepted += 1
        assert finishes(damaged), f"seed {seed}: an accepted plan does not finish"
    assert 100 < accepted < 1500  # another length, or the number that was there
