from __future__ import annotations

import numpy as np
import pytest

from engine.report.boxes import MOST_GROUPS, Span, boxes, degree_groups, label_ranks, of_plan, short_tokens
from tests.report.runs import plan, spans


def test_boxes_hold_every_token_of_the_plan_and_its_degrees() -> None:
    made = plan(ranks=8)
    found = boxes(made, spans(made))
    assert found.tokens.sum() == made.lengths.sum()
    assert found.degree.max() == made.degrees.max() > 1
    assert found.rank.tolist() == made.micro_rank.tolist()


def test_idle_micro_batches_have_degree_zero_and_no_tokens() -> None:
    made = plan(ranks=8, mode="lockstep")
    found = boxes(made, spans(made))
    idle = np.diff(made.shard_start) == 0
    assert idle.any()
    assert np.array_equal(found.degree == 0, idle)
    assert (found.tokens[idle] == 0).all()


def test_boxes_know_the_neighbours_that_share_their_rings() -> None:
    made = plan(ranks=8)
    found = boxes(made, spans(made))
    whole = found.degree == 1
    assert not (found.above | found.below)[whole].any()
    assert (found.above | found.below)[~whole].any()
    assert found.above.sum() == found.below.sum()  # each border has two sides


def test_spans_of_another_plan_are_known_as_such() -> None:
    made = plan(ranks=4)
    right = spans(made)
    assert of_plan(made, right)
    assert of_plan(made, right[::-1])
    assert not of_plan(plan(ranks=5), right)
    assert not of_plan(made, right[:-1])
    assert not of_plan(made, [*right[:-1], right[-1]._replace(rank=0)])
    assert not of_plan(made, [*right, Span(0, 10**6, 0.0, 1.0)])


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


@pytest.mark.parametrize(
    ("ranks", "every", "labels"), [(1, 1, 1), (64, 1, 64), (65, 4, 17), (300, 16, 19), (4096, 256, 16)]
)
def test_every_rank_has_a_label_up_to_64_then_every_kth(ranks: int, every: int, labels: int) -> None:
    assert label_ranks(ranks) == range(0, ranks, every)
    assert len(label_ranks(ranks)) == labels


@pytest.mark.parametrize(
    ("tokens", "text"), [(7, "7"), (1023, "1023"), (1024, "1K"), (1536, "1.5K"), (2 * 1024**2, "2M")]
)
def test_tokens_in_a_few_letters(tokens: int, text: str) -> None:
    assert short_tokens(tokens) == text
