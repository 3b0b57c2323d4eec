"""What ranks get out of a cut is what they get out of the plan.

If one of these tests fails, hosts for which another host plans train on other documents, or wait for each other.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise as neighbours

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.make import plan_step
from engine.planner.plan import cut
from engine.planner.plan.loads import unsplit_share
from engine.planner.plan.order import actions
from engine.planner.plan.step_plan import MicroBatch, RankPlan, StepPlan
from engine.planner.planners import PLANNERS
from engine.units import PPM, Ints
from tests.covering import covered
from tests.planner.pipelines import any_pipelines
from tests.planner.samples import by_hand, ints, settings

SHARDS = ("length", "ring", "part", "earlier", "later", "team")
FIGURES = ("digest", "mode", "stages", "ranks", "tokens", "unsplit_tokens", "max_degree")


def columns_of(plan: StepPlan, seed: int = 0) -> Ints:
    """A table: the numbers of the sequences, then values of any size."""
    random = np.random.default_rng(seed)
    some = [random.integers(0, 1 << bits, plan.sequences) for bits in (1, 9, 17, 33)]
    any_ = random.integers(-(2**63), 2**63 - 1, plan.sequences)
    return np.stack([np.arange(plan.sequences), *some, any_, 0 * any_ - 5])


def seen(plan: RankPlan, columns: Ints, rank: int) -> list[tuple[object, ...]]:
    """All that a rank gets of a plan: its micro-batches, and the rows of their sequences."""

    def of(micro: MicroBatch) -> tuple[object, ...]:
        shards = [(*(getattr(shard, name) for name in SHARDS), *columns[:, shard.sequence]) for shard in micro.shards]
        return micro.index, micro.rank, micro.gang, micro.slot, micro.offload, shards

    micros = [of(micro) for micro in plan.of_rank(rank)]
    assert micros == [of(plan.micro_batch(number)) for number in (micro[0] for micro in micros)]  # type: ignore[arg-type]
    of_stages = [actions(plan, rank, stage) for stage in range(plan.stages)]
    return [*micros, *of_stages, (plan.count(rank), plan.overlaps(rank), unsplit_share(plan))]  # type: ignore[list-item]


def check(plan: StepPlan, hosts: list[list[int]], seed: int = 0) -> list[cut.Cut]:
    columns, found = columns_of(plan, seed), list[cut.Cut]()
    for ranks, buffer in zip(hosts, cut.cuts(plan, hosts, columns), strict=True):
        part, rows = cut.from_bytes(buffer)
        assert isinstance(part, cut.Cut)
        assert {name: getattr(part, name) for name in FIGURES} == {name: getattr(plan, name) for name in FIGURES}
        for rank in ranks:
            assert seen(part, rows, rank) == seen(plan, columns, rank)
        of_ranks = {shard.sequence for rank in ranks for micro in plan.of_rank(rank) for shard in micro.shards}
        assert rows[0].tolist() == sorted(of_ranks), "only sequences of these ranks, in the order of the plan"
        found.append(part)
    whole, rows = cut.from_bytes(cut.to_bytes(plan, columns))
    assert isinstance(whole, StepPlan) and whole.to_bytes() == plan.to_bytes() and np.array_equal(rows, columns)
    return found


@covered("planner, mode, ranks, hosts", [*PLANNERS], ["free", "lockstep", "pipeline"], [1, 3, 8, 16], [1, 2, 5])
def test_ranks_get_the_same_out_of_a_cut(planner: str, mode: str, ranks: int, hosts: int) -> None:
    world = settings(planner, ranks, mode=mode, stages=3 if mode == "pipeline" else 1)
    random = np.random.default_rng(ranks)
    lengths = random.integers(1, 16, 6 * ranks)
    lengths[:3] = 16 * ranks, 16 * ranks // 2, 1
    plan = plan_step(lengths, world)
    plan.offload[:] = random.integers(0, PPM, plan.micro_batches)
    bounds = np.linspace(0, ranks, min(hosts, ranks) + 1).astype(int).tolist()
    check(plan, [[*range(*ends)] for ends in neighbours(bounds)])


@given(plan=any_pipelines(), data=st.data())
def test_slices_teams_and_any_ranks(plan: StepPlan, data: st.DataObject) -> None:
    """Hosts with any ranks, also with the same ones, as the stages of a pipeline on several hosts have."""
    some = st.lists(st.integers(0, plan.ranks - 1), min_size=1, unique=True)
    check(plan, data.draw(st.lists(some, min_size=1, max_size=4)), seed=plan.micro_batches)


def test_a_cut_has_nothing_of_other_ranks() -> None:
    """Rank 2 is idle. Its cut has no sequence, but the figures of the plan."""
    plan = by_hand([9, 4, 1, 30], [(1, 0), (0,), (0,), (3, 4)], [[[0], [1, 2]], [[0]], [[]], [[3]], [[3]]])
    first, idle, last = check(plan, [[0, 1], [2], [4]])
    assert (first.part.sequences, idle.part.sequences, last.part.sequences) == (3, 0, 1)
    assert [micro.shards for micro in idle.of_rank(2)] == [()]
    for rank in (-1, 2, 3, 5):
        with pytest.raises(KeyError):
            first.count(rank)
        with pytest.raises(KeyError):
            first.of_rank(rank)
        with pytest.raises(KeyError):
            first.overlaps(rank)
    for micro in (-1, 3, 4, 5, 6):
        with pytest.raises(KeyError):
            first.micro_batch(micro)


def test_no_cut_is_longer_than_its_part_of_the_plan() -> None:
    """Arrays that are constant take no bytes but those of their heads."""
    plan = plan_step(np.random.default_rng(0).integers(1, 4096, 4096), settings("adaptive", 256, 4096))
    table = columns_of(plan)[:1]
    hosts = np.arange(256).reshape(-1, 8).tolist()
    assert sum(map(len, cut.cuts(plan, hosts, table))) < 0.7 * len(plan.to_bytes())
    wide = cut.to_bytes(replace(plan, slot=np.arange(plan.micro_batches)), table)
    assert len(wide) - len(cut.to_bytes(plan, table)) == 2 * plan.micro_batches


@pytest.mark.parametrize(
    "values", [[], [7], [-3, -3], [0, 255], [5, 261], [0, 2**16], [-1, 2**32 - 1], [-(2**63), 2**63 - 1]]
)
def test_integers_of_any_size(values: list[int]) -> None:
    plan = by_hand([1], [(0,)], [[[0]]])
    wide = replace(plan, passes=ints(*values))
    found, _ = cut.from_bytes(cut.to_bytes(wide, np.empty((0, 1), dtype=np.int64)))
    assert isinstance(found, StepPlan) and found.passes.tolist() == values
