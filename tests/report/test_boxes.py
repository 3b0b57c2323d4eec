from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from engine.report.boxes import (
    MOST_GROUPS,
    MOST_ROWS,
    Span,
    boxes,
    degree_groups,
    of_plan,
    shown_ranks,
    simulated,
    simulated_spans,
)
from engine.simulator.timeline import simulate
from tests.planner import samples
from tests.report.runs import plan, spans
from tests.report.samples import all_boxes, slow_links


def test_boxes_hold_every_token_of_the_plan_and_its_degrees() -> None:
    made = plan(ranks=8)
    found = all_boxes(made)
    assert found.tokens.sum() == made.lengths.sum()
    assert found.degree.max() == made.degrees.max() > 1
    assert found.row.tolist() == made.micro_rank.tolist()


def test_idle_micro_batches_have_degree_zero_and_no_tokens() -> None:
    made = plan(ranks=8, mode="lockstep")
    found = all_boxes(made)
    idle = np.diff(made.shard_start) == 0
    assert idle.any()
    assert np.array_equal(found.degree == 0, idle)
    assert (found.tokens[idle] == 0).all()


def test_boxes_know_the_neighbours_that_share_their_rings() -> None:
    made = plan(ranks=8)
    found = all_boxes(made)
    whole = found.degree == 1
    assert not (found.above | found.below)[whole].any()
    assert (found.above | found.below)[~whole].any()
    assert found.above.sum() == found.below.sum()  # each border has two sides


def test_spans_of_another_plan_are_detected() -> None:
    made = plan(ranks=4)
    right = spans(made)
    assert of_plan(made, right)
    assert of_plan(made, right[::-1])
    assert not of_plan(plan(ranks=5), right)
    assert not of_plan(made, right[:-1])
    assert not of_plan(made, [*right[:-1], right[-1]._replace(rank=0)])
    assert not of_plan(made, [*right, Span(0, 10**6, 0.0, 1.0)])


def test_each_stage_of_a_pipeline_has_its_rows() -> None:
    """A micro-batch runs on each stage, in one span or in two: the forward and the backward pass."""
    made = plan(8, settings=samples.settings(ranks=8, capacity=1024, mode="pipeline", stages=3, max_peers=8))
    once = [span._replace(stage=stage) for stage in range(made.stages) for span in spans(made)]
    apart = [*once, *(span for span in once if span.micro_batch % 2)]
    assert made.stages > 1 and of_plan(made, once) and of_plan(made, apart)
    assert not of_plan(made, spans(made)), "the other stages are missing"
    assert not of_plan(made, [*once, *once, *once])
    found = boxes(made, apart, np.arange(8))
    assert found.stages == made.stages
    assert found.row.tolist() == [span.stage * 8 + span.rank for span in apart]
    assert not found.above[found.row % 8 == 0].any(), "the ranks of two stages share no ring"


@pytest.mark.parametrize(
    ("degrees", "ends"),
    [
        ([], []),
        ([0, 1, 1], []),
        ([1, 2, 2, 5], [(2, 2), (5, 5)]),
        (range(2, 14), [(d, d + 1) for d in range(2, 14, 2)]),
    ],
)
def test_ring_sizes_fall_into_few_groups(degrees: list[int], ends: list[tuple[int, int]]) -> None:
    groups = degree_groups(np.array(degrees, dtype=np.int64))
    assert [(group[0], group[-1]) for group in groups] == ends
    assert len(groups) <= MOST_GROUPS


@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (2, 2), (64, 64), (65, 64), (16384, 64)])
def test_at_most_64_ranks_are_shown_evenly_spaced(ranks: int, rows: int) -> None:
    shown = shown_ranks(ranks)
    assert len(shown) == rows <= MOST_ROWS
    assert (shown[0], shown[-1]) == (0, ranks - 1)
    assert np.ptp(np.diff(shown)) <= 1 if rows > 1 else shown.tolist() == [0]


def test_some_ranks_are_rows_that_touch_where_they_share_a_ring() -> None:
    made = plan(ranks=8)
    ranks = np.array([1, 2, 6])
    found = boxes(made, spans(made), ranks)
    assert len(found.row) == sum(len(list(made.of_rank(rank))) for rank in ranks.tolist())
    gangs = [{micro.gang for micro in made.of_rank(rank)} for rank in ranks.tolist()]
    assert found.below[found.row == 0].sum() == len(gangs[0] & gangs[1]) == found.above[found.row == 1].sum()
    assert found.below[found.row == 1].sum() == len(gangs[1] & gangs[2]) == found.above[found.row == 2].sum()
    assert not found.above[found.row == 0].any() and not found.below[found.row == 2].any()


@pytest.mark.parametrize("mode", ["free", "lockstep", "pipeline"])
def test_simulated_spans_contain_all_compute_and_waits_for_transfers(mode: str) -> None:
    """Compared with the simulator's means; a pipeline shows both passes of its first stage; all stages are alike."""
    settings = slow_links(ranks=6, mode=mode)
    made = plan(ranks=6, mode=mode, settings=settings)
    line = simulate(made, settings)
    found = simulated_spans(made, settings, line, np.arange(6))
    busy = [span for span in found if np.diff(made.shard_start)[span.micro_batch]]
    exposed = sum(span.exposed_s for span in busy)
    assert len(found) == made.micro_batches * (2 if mode == "pipeline" else 1)
    assert exposed * 1e9 / 6 == pytest.approx(line.exposed)
    assert exposed > 0
    computed = sum(span.stop_s - span.start_s - span.exposed_s for span in busy)
    assert computed * 1e9 / 6 == pytest.approx(line.compute)
    for span in found:
        assert 0 <= span.start_s <= span.stop_s - span.exposed_s <= span.stop_s <= (line.makespan + 1) / 1e9


@pytest.mark.parametrize("mode", ["free", "lockstep", "pipeline"])
def test_simulated_spans_of_a_rank_do_not_overlap(mode: str) -> None:
    settings = slow_links(ranks=6, mode=mode)
    made = plan(ranks=6, mode=mode, settings=settings)
    found = simulated_spans(made, settings, simulate(made, settings), np.arange(6))
    for rank in range(6):
        mine = sorted((span.start_s, span.stop_s) for span in found if span.rank == rank)
        assert all(stop <= start + 2e-9 for (_, stop), (start, _) in pairwise(mine))


def test_the_step_ends_with_its_last_micro_batch_shown_or_not() -> None:
    made = plan(ranks=8)
    last = max(span.stop_s for span in spans(made))
    assert boxes(made, spans(made), np.array([0])).end_s == last
    settings = slow_links(ranks=8, mode="free")
    found = simulated(made, settings, most=3)
    assert found.ranks.tolist() == [0, 4, 7]
    assert found.end_s == simulate(made, settings).makespan / 1e9
