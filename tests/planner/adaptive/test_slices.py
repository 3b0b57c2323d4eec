"""Slots that are cut: slices tile their sequence and take about equally long, and no rank gets more tokens at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cost.times import Rates, pairs
from engine.planner.adaptive.build import Cut
from engine.planner.adaptive.slices import cut_slots
from engine.planner.adaptive.slots import Slots
from engine.planner.adaptive.workload import workload_of
from engine.planner.time.bound import ring_time
from engine.units import Ints
from tests.planner.samples import LINKED_COSTS, RATES, ints, settings

RANKS, NODE, HOLDS = 8, 8, 4096


def cut_of(
    lengths: Ints,
    degree: Ints,
    first: Ints,
    number: Ints,
    target: float,
    holds: int = HOLDS,
    rates: Rates = RATES,
) -> Cut:
    """Cut the slots of sequences that are in descending order."""
    costs = replace(LINKED_COSTS, rates=rates)
    ours = replace(settings("adaptive", RANKS, holds, context=10**9), costs=costs)
    targets = np.full(int(number.max()) + 1, target)
    return cut_slots(workload_of(lengths, ours), Slots(number, degree, first), ours, targets)


@st.composite
def slots(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    """Draw sequences on rings of neighbouring ranks, in up to three slots."""
    lengths, degree, first, number = [], [], [], []
    for _ in range(draw(st.integers(1, 12))):
        wide = draw(st.integers(1, RANKS))
        lengths.append(draw(st.integers(1, HOLDS * wide)))
        degree.append(wide)
        first.append(draw(st.integers(0, RANKS - wide)))
        number.append(draw(st.integers(0, 2)))
    order = np.argsort(-np.array(lengths), kind="stable").tolist()
    number = np.unique(number, return_inverse=True)[1].tolist()
    return tuple([row[at] for at in order] for row in (lengths, degree, first, number))  # type: ignore[return-value]


@given(slots(), st.sampled_from([1e5, 1e6, 1e7, 1e9, np.inf]), st.sampled_from([1, 4]))
def test_slices_tile_their_sequences_and_no_rank_gets_more_than_it_had(
    drawn: tuple[list[int], list[int], list[int], list[int]], target: float, team: int
) -> None:
    lengths, degree, first, number = (ints(*row) for row in drawn)
    cut = cut_of(lengths, degree, first, number, target, rates=RATES._replace(team=team))
    assert np.unique(cut.number).tolist() == list(range(int(cut.number.max()) + 1)), "no slot is empty"
    before, tokens = (np.zeros((int(of.max()) + 1, RANKS), dtype=np.int64) for of in (number, cut.number))
    source = np.full(len(tokens), -1)  # by new slot: the one that was cut
    for sequence, length in enumerate(lengths.tolist()):
        own = np.flatnonzero(cut.sequence == sequence)
        assert cut.lengths[own].min() >= 1 and cut.lengths[own].sum() == length
        assert cut.before[own].tolist() == [0, *np.cumsum(cut.lengths[own])[:-1].tolist()]
        assert np.diff(cut.number[own]).tolist() == [1] * (len(own) - 1), "one after the other"
        assert len(set(cut.team[own].tolist())) == 1 and degree[sequence] % cut.team[own[0]] == 0
        assert cut.team[own[0]] <= team
        assert len(own) == 1 or target < np.inf
        ranks = slice(int(first[sequence]), int(first[sequence] + degree[sequence]))
        before[number[sequence], ranks] += -(-length // int(degree[sequence]))
        for at in own.tolist():
            tokens[cut.number[at], ranks] += -(-int(cut.lengths[at]) // int(degree[sequence]))
            assert source[cut.number[at]] in (-1, number[sequence])
            source[cut.number[at]] = number[sequence]
    assert (tokens <= before[source]).all()


@pytest.mark.parametrize(("windowed", "window"), [(0.0, 1.0), (0.5, 4096.0), (5 / 6, 60_000.0), (1.0, 4096.0)])
def test_the_slices_of_a_sequence_take_equally_long(windowed: float, window: float) -> None:
    """Each slice attends to all earlier ones, in some layers up to a window, so the first is the longest."""
    rates = RATES._replace(windowed=windowed, window=window)
    lengths, target = ints(100_000), ring_time(rates, 100_000.0, 4, NODE, 0.0) / 4
    cut = cut_of(lengths, ints(4), ints(0), ints(0), target, 10**6, rates)
    assert len(cut.lengths) == 4 and (np.diff(cut.lengths) <= 0).all() and cut.lengths[0] > cut.lengths[1]
    slices = zip(cut.lengths.tolist(), cut.before.tolist(), strict=True)
    causal = np.array([pairs(rates, float(own), float(before)) for own, before in slices])
    work = (rates.pair_f + rates.pair_b) * causal + (rates.token_f + rates.token_b) * cut.lengths
    assert work == pytest.approx(np.full(4, work.mean()), rel=0.01)
