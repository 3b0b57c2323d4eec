"""The ring schedule against brute force: every causal pair once, every buffer where it belongs."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.plan import schedule

DIRECTIONS: tuple[schedule.Direction, ...] = ("forward", "backward", "counts")
DEGREES = [*range(1, 6), 8]


def chunk_bounds(length: int, degree: int) -> list[int]:
    return [schedule.chunk_start(*divmod(length, 2 * degree), chunk) for chunk in range(2 * degree + 1)]


@given(length=st.integers(1, 3_000_000), degree=st.integers(1, 300))
def test_chunks_tile_the_sequence_and_differ_by_at_most_one_token(length: int, degree: int) -> None:
    bounds = chunk_bounds(length, degree)
    sizes = np.diff(bounds)
    assert len(sizes) == 2 * degree and bounds[0] == 0 and bounds[-1] == length
    assert sizes.min() >= 0 and sizes.max() <= sizes.min() + 1


@given(length=st.integers(1, 5000), degree=st.integers(1, 40))
def test_shards_are_mirrored_chunks_of_at_most_the_mean_rounded_up(length: int, degree: int) -> None:
    bounds = chunk_bounds(length, degree)
    tokens = []
    for part in range(degree):
        mirror = 2 * degree - 1 - part
        spans = schedule.shard_spans(length, degree, part)
        assert spans == ((bounds[part], bounds[part + 1]), (bounds[mirror], bounds[mirror + 1]))
        tokens.append(schedule.shard_tokens(length, degree, part))
    assert sum(tokens) == length
    assert max(tokens) == -(-length // degree)


def positions(length: int, degree: int, part: int) -> list[int]:
    """Return the positions of a shard's tokens in the order in which the rank holds them."""
    low, high = schedule.shard_spans(length, degree, part)
    return [*range(low.start, low.stop), *range(high.start, high.stop)]


@pytest.mark.parametrize("degree", DEGREES)
def test_blocks_cover_the_causal_mask_each_pair_once(degree: int) -> None:
    lengths = {1, 2, 3, 7, 29, degree, 2 * degree - 1, 2 * degree, 2 * degree + 1, 4 * degree + 3}
    for length in sorted(lengths):
        check_mask(degree, 1, (length,))


@pytest.mark.parametrize("team", [1, 2, 3, 4])
@pytest.mark.parametrize("degree", [4, 6, 12])
def test_blocks_of_slices_and_teams_cover_the_causal_mask_each_pair_once(degree: int, team: int) -> None:
    if degree % team == 0:
        for slices in ((5, 9), (3, 1, 2 * degree + 1), (30, 20, 10, 1)):
            for most in (1, 2, 4):
                check_mask(degree, team, slices, most)


def held(slices: tuple[int, ...], number: int, degree: int, part: int) -> list[int]:
    """Return the positions in the sequence of a shard's tokens of slice `number`, in the order of `positions`."""
    return [sum(slices[:number]) + one for one in positions(slices[number], degree, part)]


def check_mask(degree: int, team: int, slices: tuple[int, ...], most: int = 1) -> None:
    """Check which queries meet which keys, over all slices, parts and calls: those of the causal mask, once each."""
    met = np.zeros((sum(slices), sum(slices)), dtype=int)
    for at, length in enumerate(slices):
        earlier = slices[:at]
        for part in range(degree):
            itself = held(slices, at, degree, part)
            for i, query in enumerate(itself):
                met[query, itself[: i + 1]] += 1
            rounds = range(schedule.rounds(degree, "forward", team))
            for _, call in groupby(rounds, lambda round_: schedule.call_of_round(round_, most)):
                parts = [schedule.kv_part(degree, part, round_, team) for round_ in call]
                keys = [[one for n in range(at + 1) for one in held(slices, n, degree, kv)] for kv in parts]
                for q_part in (part, *schedule.mates(part, team)):
                    for block in schedule.blocks(length, degree, q_part, parts, earlier):
                        queries = held(slices, at, degree, q_part)[block.q_start : block.q_stop]
                        assert queries and sum(block.keys) > 0 and len(block.keys) == len(parts)
                        for size, of_part in zip(block.keys, keys, strict=True):
                            assert size <= len(of_part)
                            met[np.ix_(queries, of_part[:size])] += 1
    assert np.array_equal(met, np.tril(np.ones(met.shape, dtype=int)))


TEAMS = [(degree, 1) for degree in DEGREES] + [(4, 2), (4, 4), (9, 3), (16, 2), (16, 4)]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("degree", "team"), TEAMS)
def test_every_send_has_its_receive_in_the_same_order(degree: int, team: int, direction: schedule.Direction) -> None:
    """Rule 6 of `verify` rests on it."""
    for round_ in range(schedule.rounds(degree, direction, team) + 1):
        for part in range(degree):
            sent = schedule.transfers(degree, part, round_, direction, team)
            hop = 1 if direction == "counts" else team
            received = schedule.transfers(degree, (part + hop) % degree, round_, direction, team)
            assert [(t.kind, t.send) for t in sent] == [(t.kind, t.receive) for t in received]
            assert round_ < schedule.rounds(degree, direction, team) or not sent


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("degree", DEGREES)
def test_every_part_holds_the_keys_that_it_needs_next(degree: int, direction: schedule.Direction) -> None:
    """Every part computes with all K,V, its own first, and sends only what it holds; the same holds for counts."""
    holds = list(range(degree))
    met: list[set[int]] = [set() for _ in range(degree)]
    for round_ in range(degree):
        for part in range(degree):
            assert schedule.kv_part(degree, part, round_) == holds[part]
            met[part].add(holds[part])
        holds = _passed(holds, degree, round_, direction, "counts" if direction == "counts" else "kv")
    assert all(parts == set(range(degree)) for parts in met)


@pytest.mark.parametrize("degree", DEGREES)
def test_gradients_of_keys_visit_every_part_and_return(degree: int) -> None:
    """A part holds a buffer of dK,dV in the round in which it adds to it; the buffer returns to its owner."""
    visited: dict[int, list[int]] = {part: [] for part in range(degree)}
    holds = list(range(degree))
    for round_ in range(schedule.rounds(degree, "backward")):
        holds = _passed(holds, degree, round_, "backward", "dkv")
        if round_ < degree:
            for part in range(degree):
                assert holds[part] == schedule.kv_part(degree, part, round_)
                visited[holds[part]].append(part)
    assert holds == list(range(degree))
    assert all(sorted(parts) == list(range(degree)) for parts in visited.values())


def _passed(holds: list[int], degree: int, round_: int, direction: schedule.Direction, kind: str) -> list[int]:
    """Return the buffer that each part holds after the transfers of a round."""
    after = list(holds)
    for part in range(degree):
        for transfer in schedule.transfers(degree, part, round_, direction):
            if transfer.kind == kind:
                assert transfer.send == holds[part]
                after[(part + 1) % degree] = transfer.send
    return after
