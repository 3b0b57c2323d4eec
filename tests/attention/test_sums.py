"""Sums around rings against sums over unsplit sequences, and the bytes that they take."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.layout import idle, layout
from engine.attention.sums import sum_over_rings
from tests.attention.rings import Case, Placed, ThreadComm, links_between

NUMBERS = 3


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world = draw(st.integers(1, 5))
    rings = st.permutations(range(world)).flatmap(lambda ranks: st.integers(1, world).map(lambda n: tuple(ranks[:n])))
    placed = rings.flatmap(lambda ring: st.builds(Placed, st.integers(1, 12), st.just(ring), team=teams(ring)))
    return Case(tuple(draw(st.lists(placed, min_size=1, max_size=6))), world)


def teams(ring: tuple[int, ...]) -> st.SearchStrategy[int]:
    """Return the sizes of teams that a ring may have, which change nothing here."""
    return st.sampled_from([size for size in range(1, len(ring) + 1) if len(ring) % size == 0])


def counts_of(case: Case, rank: int) -> tuple[list[int], Tensor]:
    """Return the sequences of a rank, and random counts of its shards, [S,N]."""
    held = [number for number, one in enumerate(case.sequences) if rank in one.ring]
    generator = torch.Generator().manual_seed(rank)
    return held, torch.randint(0, 2**40, (len(held), NUMBERS), generator=generator)


@given(cases())
def test_every_member_has_the_sum_of_its_ring(case: Case) -> None:
    """Empty shards take part; a sequence without a ring is its own sum, and counts given in are left as they were."""
    links = links_between(case.world)

    def on_rank(rank: int) -> Tensor:
        counts = counts_of(case, rank)[1]
        before = counts.clone()
        total = sum_over_rings(counts, layout(case.micro_batch(rank)), ThreadComm(rank, links))
        assert torch.equal(counts, before)
        return total

    with ThreadPoolExecutor(case.world) as pool:
        totals = list(pool.map(on_rank, range(case.world)))
    expected = torch.zeros(len(case.sequences), NUMBERS, dtype=torch.int64)
    for rank in range(case.world):
        held, counts = counts_of(case, rank)
        expected[held] += counts
    for rank in range(case.world):
        assert torch.equal(totals[rank], expected[counts_of(case, rank)[0]])
    assert all(link.empty() for link in links.values())


def test_an_idle_micro_batch_sums_nothing() -> None:
    assert sum_over_rings(torch.zeros(0, 4, dtype=torch.int64), idle(1), None).shape == (0, 4)
