"""Random pipeline plans: with rings in any order, and with rings at the same place on all of their ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from engine.planner.plan.emit import Placement, build
from engine.planner.plan.modes import lockstep, pipelined
from engine.planner.plan.order import nodes, one_f_one_b
from engine.planner.plan.step_plan import StepPlan
from engine.units import Ints
from tests.planner.samples import by_hand, ints


@st.composite
def any_pipelines(draw: st.DrawFn) -> StepPlan:
    """Make a plan in which each rank runs its slices one by one, in a random order or in the common one.

    Each micro-batch has one slice, so a gang is one ring: no member finishes a pass before all have started it. The
    order of passes is 1F1B, or any other one in which each pass may come after those that it needs, or not.
    """
    ranks = draw(st.integers(1, 4))
    ring = st.permutations(range(ranks)).flatmap(lambda order: st.integers(1, ranks).map(lambda d: tuple(order[:d])))
    rings, before, teams = list[tuple[int, ...]](), list[int](), list[int]()
    for one in draw(st.lists(ring, min_size=1, max_size=6)):
        slices = draw(st.sampled_from([1, 1, 1, 2, 3, 4]))
        team = draw(st.sampled_from([size for size in range(1, len(one) + 1) if len(one) % size == 0]))
        rings += [one] * slices
        before += [8 * number for number in range(slices)]
        teams += [team] * slices
    micros = []
    for rank in range(ranks):
        own = [at for at, members in enumerate(rings) if rank in members]
        order = draw(st.one_of(st.just(own), st.just(own), st.permutations(own)))
        micros.append([[at] for at in order] or [[]])
    plan = replace(by_hand([8] * len(rings), rings, micros), before=ints(*before), team=ints(*teams))
    plan = staged(plan, draw(st.integers(2, 4)))
    return replace(plan, passes=draw(orders(len(plan.passes) // (2 * plan.stages), plan.stages)))


@st.composite
def orders(draw: st.DrawFn, places: int, stages: int) -> Ints:
    """Make an order of passes: 1F1B, backward passes in reverse, a random one, or one with mistakes."""
    kind = draw(st.sampled_from(["1f1b", "reverse", "random", "mistakes"]))
    if kind == "1f1b":
        return one_f_one_b(places, stages)
    forward = [2 * (place * stages + stage) for place in range(places) for stage in range(stages)]
    backward = [2 * (p * stages + s) + 1 for p in reversed(range(places)) for s in reversed(range(stages))]
    if kind == "reverse":
        return ints(*forward, *backward)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # Each micro-batch goes through the stages and back; a random one of them goes on.
    ways = [[2 * (p * stages + s) for s in range(stages)] for p in range(places)]
    ways = [way + [number + 1 for number in reversed(way)] for way in ways]
    order = []
    while any(ways):
        way = ways[rng.choice([at for at, left in enumerate(ways) if left])]
        order.append(way.pop(0))
    if kind == "mistakes":
        for _ in range(int(rng.integers(1, 4))):
            at, other = rng.integers(0, len(order), 2)
            order[at], order[other] = order[other], order[at]
    return ints(*order)


def staged(plan: StepPlan, stages: int) -> StepPlan:
    """Make a pipeline that runs 1F1B of a plan of another mode."""
    places = int(np.diff(plan.micro_start).max())
    return replace(plan, mode="pipeline", stages=stages, passes=one_f_one_b(places, stages))


def aligned_pipeline(rng: np.random.Generator) -> StepPlan:
    """Make a plan of unequal numbers of micro-batches in which each gang has one place on all of its ranks."""
    counts = rng.integers(1, 6, int(rng.integers(1, 6)))
    rings: list[list[int]] = []
    places: list[int] = []
    for place in range(int(counts.max())):
        working = rng.permutation(np.flatnonzero(counts > place))
        cuts = np.unique(rng.integers(0, len(working), 3))
        for ring in np.split(working, cuts[cuts > 0]):
            rings.append(ring.tolist())
            places.append(place)
    start = np.cumsum([0, *map(len, rings)])
    flat = ints(*(rank for ring in rings for rank in ring))
    lengths, stages = rng.integers(1, 30, len(rings)), int(rng.integers(2, 5))
    return build("aligned", "pipeline", len(counts), 30, Placement(lengths, ints(*places), start, flat), stages)


def sliced(plan: StepPlan, slices: int, stages: int, seed: int) -> StepPlan:
    """Make a pipeline in which every sequence of a plan is cut into slices, with random teams and a random order.

    Each micro-batch becomes `slices` ones, and each sequence has one slice in each, as far as it has tokens for them.
    """
    rng = np.random.default_rng(seed)
    slotted = plan if plan.mode == "lockstep" else lockstep(plan) if plan.mode == "free" else plan
    place = np.arange(slotted.micro_batches) - slotted.micro_start[slotted.micro_rank]
    rows: dict[str, list[int]] = {"lengths": [], "before": [], "group": [], "team": []}
    rings: list[tuple[int, ...]] = []
    for at, length in zip(np.flatnonzero(slotted.before == 0).tolist(), slotted.sequence_lengths.tolist(), strict=True):
        parts = [len(part) for part in np.array_split(np.arange(length), min(slices, length))]
        ring = slotted.ring(at)
        team = int(rng.choice([size for size in range(1, len(ring) + 1) if len(ring) % size == 0]))
        group = int(place[slotted.shard_micro[slotted.ring_start[at]]]) * slices
        for number, part in enumerate(parts):
            rows["lengths"].append(part)
            rows["before"].append(sum(parts[:number]))
            rows["group"].append(group + number)
            rows["team"].append(team)
            rings.append(ring)
    start = np.cumsum([0, *map(len, rings)])
    flat = ints(*(rank for ring in rings for rank in ring))
    lengths, before, group, team = (ints(*rows[name]) for name in ("lengths", "before", "group", "team"))
    placed = Placement(lengths, group, start, flat, before=before, team=team)
    made = pipelined(build(plan.planner, "lockstep", plan.ranks, plan.capacity, placed), stages)
    return replace(made, passes=order_of_slices(int(np.diff(made.micro_start).max()), slices, stages, rng))


def order_of_slices(places: int, slices: int, stages: int, rng: np.random.Generator) -> Ints:
    """Make a random order in which blocks of `slices` places run forward in their order, and backward in reverse."""
    forward, backward = np.zeros((places, stages), dtype=bool), np.zeros((places, stages), dtype=bool)
    order: list[int] = []
    while not backward.all():
        ready = []
        for at in range(places):
            earlier, later = at - 1 if at % slices else None, at + 1 if (at + 1) % slices and at + 1 < places else None
            for stage in range(stages):
                if not forward[at, stage]:
                    if (stage == 0 or forward[at, stage - 1]) and (earlier is None or forward[earlier, stage]):
                        ready.append((at, stage, 0))
                elif not backward[at, stage] and (later is None or backward[later, stage]):
                    arrived = forward[at, stage] if stage == stages - 1 else backward[at, stage + 1]
                    if arrived:
                        ready.append((at, stage, 1))
        at, stage, back = ready[int(rng.integers(len(ready)))]
        (backward if back else forward)[at, stage] = True
        order.append(2 * (at * stages + stage) + back)
    return ints(*order)


aligned_pipelines = st.integers(0, 2**32 - 1).map(lambda seed: aligned_pipeline(np.random.default_rng(seed)))


def passes_agree(plan: StepPlan, order: Ints, before: Ints, after: Ints) -> bool:
    """True if `order` has every node once and all edges point forward in it."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return sorted(order.tolist()) == list(range(nodes(plan))) and bool((place[before] < place[after]).all())
