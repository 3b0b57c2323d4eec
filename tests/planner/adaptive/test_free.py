from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.adaptive import free
from engine.planner.adaptive.free import Candidate
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
