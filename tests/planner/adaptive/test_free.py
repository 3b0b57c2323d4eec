from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.adaptive import free
from engine.planner.adaptive.free import RULES, Candidate, rules_of
from engine.planner.adaptive.skyline import Rings
from engine.planner.adaptive.workload import workload_of
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.simulator.timeline import simulate
from engine.units import Ints
from tests.planner.samples import ints, settings

EIGHT = settings("adaptive", 8)


def nowhere(_: Ints, best: Candidate, __: Ints) -> Ints:
    return np.full(len(best.rank_of), -1)


def both(step: Ints, asked: PlanSettings) -> tuple[StepPlan, StepPlan]:
    """A plan, and the one whose unsplit sequences never join a ring's micro-batch."""
    with pytest.MonkeyPatch.context() as patch:
        together = plan_step(step, asked)
        patch.setattr(free, "joined_ring", nowhere)
        return together, plan_step(step, asked)


@given(st.lists(st.integers(1, 40), min_size=9, max_size=30), st.integers(8, 12))
def test_unsplit_sequences_in_a_rings_micro_batch_never_lengthen_the_step(step: list[int], ranks: int) -> None:
    asked = settings("adaptive", ranks)
    together, apart = both(ints(*step), asked)
    assert simulate(together, asked).makespan <= simulate(apart, asked).makespan * (1 + 1e-9)


def test_a_ring_with_capacity_left_takes_its_members_unsplit_sequences() -> None:
    """Eight ranks in one ring of 8 tokens each; a rank's other 8 of 16 tokens are left for two short sequences."""
    together, apart = both(ints(64, *[4] * 16), EIGHT)
    assert (len(together.micro_rank), len(apart.micro_rank)) == (8, 16)
    assert simulate(together, EIGHT).makespan < simulate(apart, EIGHT).makespan


def rings_of(first: list[int], degree: list[int], rank_of: list[int]) -> list[int]:
    """The ring that each unsplit sequence of 4 tokens joins; rings hold 8 tokens per rank, and a rank holds 16."""
    count = len(first)
    rings = Rings(ints(*degree), ints(*first), np.arange(count, dtype=float))
    best = Candidate(count, rings, np.zeros(4), ints(*rank_of), np.zeros(4))
    lengths = ints(*(8 * d for d in degree), *[4] * len(rank_of))
    return free.joined_ring(lengths, best, np.full(4, 16)).tolist()


def test_all_members_must_have_capacity_left() -> None:
    assert rings_of([0], [4], [0, 0, 1]) == [0, 0, 0]
    assert rings_of([0], [4], [0, 0, 0, 1]) == [-1] * 4
    assert rings_of([0], [2], [0, 2, 3]) == [0, -1, -1]


def test_the_ring_must_be_the_last_of_all_its_members() -> None:
    assert rings_of([0, 0], [4, 4], [0, 3]) == [1, 1]
    assert rings_of([0, 2], [4, 2], [0, 2]) == [-1, 1]


@pytest.mark.parametrize(
    ("step", "ranks", "tried"),
    [
        ([16] * 40, 8, [1, 2, 4, 5, 6]),  # many unsplit sequences
        ([128, *[1] * 4], 8, [2, 1, 4, 5, 6, 7, 8]),  # few sequences, most of the work in one ring
        ([16] * 4096, 8, [1, 2]),  # large
    ],
)
def test_which_rules_are_tried(step: list[int], ranks: int, tried: list[int]) -> None:
    found = rules_of(workload_of(ints(*step), settings("adaptive", ranks)))
    assert [RULES.index(rule) + 1 for rule in found] == tried
