"""Orders of passes: they respect what a pipeline must, take what they say, and leave little idle time."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.adaptive.interleave import Jobs, Order, interleave
from engine.units import Ints
from tests.planner.samples import ints


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Jobs, Ints]:
    """Draw up to nine slots on up to four stages, some of which continue the one before, and a memory for them."""
    count, stages = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 50), min_size=count, max_size=count)
    times = st.lists(row, min_size=stages, max_size=stages)
    linked = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    linked[0] = False
    held = ints(*draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)))
    forward, backward = (np.array(draw(times), dtype=float) for _ in range(2))
    most = ints(*(draw(st.integers(4, 30)) for _ in range(stages)))
    return Jobs(forward, backward, np.tile(held, (stages, 1)), linked), most


def ends(of: Jobs, most: Ints, passes: Ints) -> float:
    """Run passes in the order of a list, each as early as it can, and check that it may run. Returns the last end."""
    stages, last = len(most), len(most) - 1
    end: dict[tuple[int, int, int], float] = {}
    free, live = [0.0] * stages, [0] * stages
    for number in passes.tolist():
        (job, stage), back = divmod(number // 2, stages), number % 2
        before = [free[stage]]
        if back:
            before.append(end[job, stage, 0] if stage == last else end[job, stage + 1, 1])
            if job + 1 < len(of.linked) and of.linked[job + 1]:
                before.append(end[job + 1, stage, 1])
            live[stage] -= int(of.tokens[stage, job])
        else:
            if stage:
                before.append(end[job, stage - 1, 0])
            if of.linked[job]:
                before.append(end[job - 1, stage, 0])
            live[stage] += int(of.tokens[stage, job])
            assert live[stage] <= most[stage]
        free[stage] = end[job, stage, back] = max(before) + (of.backward if back else of.forward)[stage, job]
    return max(free)


def slow_schedule(of: Jobs, most: Ints, priority: Ints) -> Order:
    """A schedule made in order of time, that looks at all passes before each one."""
    (stages, count), end = of.forward.shape, dict[tuple[int, int, int], float]()  # by slot, stage, and 1 if backward
    free, live, passes = [0.0] * stages, [0] * stages, list[tuple[float, int]]()
    for _ in range(2 * stages * count):
        ready = []
        for job, stage, back in product(range(count), range(stages), (0, 1)):
            last = stage == stages - 1
            inputs = [(job, stage, 0) if last else (job, stage + 1, 1)] if back else [(job, stage - 1, 0)] * (stage > 0)
            linked = job + back < count and of.linked[job + back]  # a slot follows the one before it, backward precedes
            others = [(job + 2 * back - 1, stage, back)] if linked else []
            fits = back or live[stage] + of.tokens[stage, job] <= most[stage]
            if (job, stage, back) not in end and fits and all(one in end for one in inputs + others):
                start = max([free[stage], *(end[one] for one in inputs)])
                ready.append((start, stage, priority[job] - count * back, job, back))
        if not ready:
            return Order(np.zeros(0, np.int64), np.inf)
        start, stage, _, job, back = min(ready)
        free[stage] = end[job, stage, back] = start + (of.backward if back else of.forward)[stage, job]
        live[stage] += (1 - 2 * back) * of.tokens[stage, job]
        passes.append((free[stage], 2 * (job * stages + stage) + back))
    return Order(ints(*(number for _, number in sorted(passes, key=lambda one: one[0]))), max(free))


@given(jobs())
def test_without_a_search_the_best_of_three_orders_is_that_of_a_slow_schedule(drawn: tuple[Jobs, Ints]) -> None:
    """Chains with the most work first, last, or first but for the shortest, which runs before all others."""
    of, most = drawn
    chain = np.cumsum(~of.linked) - 1
    work = np.bincount(chain, (of.forward + of.backward).sum(0))
    longest = np.argsort(-work, kind="mergesort")
    found = [
        slow_schedule(of, most, np.argsort(order)[chain]) for order in (longest, longest[::-1], np.roll(longest, 1))
    ]
    expected, ours = min(found, key=lambda one: one.makespan), interleave(of, most, sweeps=0)
    assert ours.makespan == expected.makespan
    assert ours.makespan == np.inf or ours.passes.tolist() == expected.passes.tolist()


def test_the_search_ends_after_a_number_of_trials_of_the_jobs() -> None:
    """With thousands of slots a sweep over all places would take hours."""
    times = np.ones((2, 1500))
    of = Jobs(times, times, np.ones((2, 1500), dtype=np.int64), np.zeros(1500, dtype=np.bool_))
    first, again = (interleave(of, ints(4, 4)) for _ in range(2))
    assert sorted(first.passes.tolist()) == list(range(4 * 1500))
    assert first.passes.tolist() == again.passes.tolist()


@given(jobs(), st.integers(0, 2))
def test_an_order_has_every_pass_once_and_takes_what_it_says(drawn: tuple[Jobs, Ints], sweeps: int) -> None:
    of, most = drawn
    found = interleave(of, most, sweeps)
    if found.makespan == np.inf:  # chains hold all their slots at once
        chains = np.cumsum(~of.linked)
        assert any(of.tokens[0, chains == chain].sum() > most.min() for chain in chains)
        return
    assert sorted(found.passes.tolist()) == list(range(2 * of.forward.size))
    assert ends(of, most, found.passes) == pytest.approx(found.makespan)
    assert found.makespan >= (of.forward + of.backward).sum(1).max() - 1e-9
    assert interleave(of, most, sweeps).passes.tolist() == found.passes.tolist(), "the same every time"


def test_short_slots_fill_the_time_in_which_a_long_one_is_on_other_stages() -> None:
    """In 1F1B every stage waits for the long one three times: 8 x 6 + 120 + 3 x 120."""
    forward = np.tile([40.0] + [2.0] * 24, (4, 1))
    of = Jobs(forward, 2 * forward, np.ones((4, 25), np.int64), np.zeros(25, np.bool_))
    found = interleave(of, ints(20, 20, 20, 20))
    assert found.makespan < 0.95 * (24 * 6 + 120 + 3 * 120)
