"""Filled slots hold every sequence once, no rank beyond its capacity, and little idle time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.cost.times import Rates
from engine.planner.adaptive.fill import Slot, fill_slots
from engine.planner.time.bound import ring_time
from engine.units import Ints
from tests.planner.samples import COSTS, ints

RATES = COSTS.rates._replace(micro=0.0)
LINKS = RATES._replace(latency=50_000.0, round=20_000.0, kv=10.0, dkv=20.0, inter_node_slowdown=4.0)


def slot_of(holds: int, node: int, ranks: int, charge: float) -> Slot:
    """A slot of equal ranks."""
    return Slot(holds, np.full(ranks, holds), np.ones(ranks), float(ranks), node, ranks, charge, np.inf)


def filled(lengths: Ints, like: Slot, rates: Rates = RATES, gain: float = 1.0) -> tuple[Ints, Ints, Ints]:
    found = np.zeros_like(lengths), np.zeros_like(lengths), np.full_like(lengths, -1)
    fill_slots(rates, lengths, np.full(len(lengths), gain * like.holds), like, *found)
    return found


def tokens_of(lengths: Ints, like: Slot, degree: Ints, first: Ints, slot: Ints) -> Ints:
    """Tokens of each rank in each slot, [slots, P]."""
    tokens = np.zeros((slot.max() + 1, like.ranks), dtype=np.int64)
    for at in range(len(lengths)):
        tokens[slot[at], first[at] : first[at] + degree[at]] += -(-lengths[at] // degree[at])
    return tokens


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=60),
    st.integers(1, 20),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([1.0, 1.5, 3.0]),
)
def test_every_sequence_has_a_slot_and_no_rank_more_than_it_holds(
    step: list[int], ranks: int, node: int, links: bool, gain: float
) -> None:
    """Also if one rank, with offload, holds a sequence longer than its capacity."""
    like = slot_of(64, node, ranks, 1000.0)
    lengths = -np.sort(-np.minimum(ints(*step), ranks * 64))
    degree, first, slot = filled(lengths, like, LINKS if links else RATES, gain)
    assert degree.min() >= 1 and first.min() >= 0 and (first + degree).max() <= ranks
    assert set(slot.tolist()) == set(range(slot.max() + 1))
    assert tokens_of(lengths, like, degree, first, slot).max() <= 64 * gain
    assert (degree <= (lengths + 1) // 2).all(), "no ring of empty shards"


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=20),
    st.lists(st.sampled_from([50, 70, 100]), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_slots_are_filled_on_slow_ranks_too(step: list[int], speed: list[int], top: float) -> None:
    """Without ranks of full speed, or within the limit: it never ended for a limit that the longest cannot keep."""
    lengths, slow = -np.sort(-ints(*step)), 100 / np.array(speed)
    limit = top * ring_time(RATES, float(lengths[0]), 1, 8, 0.0) * slow.max()
    like = slot_of(64, 8, len(speed), 1000.0)._replace(slow=slow, power=sum(speed) / 100, top=limit)
    _, _, slot = filled(lengths, like)
    assert set(slot.tolist()) == set(range(slot.max() + 1))


def test_slots_are_about_as_long_as_their_work() -> None:
    """Random lengths, four per rank: at least 95 % of all slots is work."""
    random = np.random.Generator(np.random.Philox(key=3))
    lengths = -np.sort(-np.clip(random.lognormal(3.5, 1.0, 128), 4, 250).astype(np.int64))
    like = slot_of(64, 8, 32, 5000.0)
    degree, first, slot = filled(lengths, like)
    height = np.zeros((slot.max() + 1, 32))
    for at in range(128):
        time = ring_time(RATES, float(lengths[at]), int(degree[at]), 8, 0.0)
        height[slot[at], first[at] : first[at] + degree[at]] += time
    work = sum(ring_time(RATES, float(length), 1, 8, 0.0) for length in lengths.tolist())
    assert work / 32 >= 0.95 * height.max(axis=1).sum()
