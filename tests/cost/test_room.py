from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engine.cost import room
from engine.cost.model import PPM
from tests.planner.samples import COSTS, ints

tokens_of = st.integers(1, 2**20)


@given(tokens=tokens_of, uneven=st.integers(0, 200), capacity=tokens_of, away=st.integers(0, PPM))
def test_the_least_ratio_fits_and_less_does_not(tokens: int, uneven: int, capacity: int, away: int) -> None:
    """With buffers of more tokens than the micro-batch's own: its rings' largest shards lie on other ranks."""
    costs = replace(COSTS, passing_bytes=0)  # gradients that pass are there whatever waits
    number, buffers = ints(tokens), ints(tokens + uneven)
    memory = costs.peak_bytes(number, buffers, away)
    (ratio,) = room.least_ratio(costs, number, buffers, ints(capacity), memory).tolist()

    def fits(ppm: int) -> bool:
        return bool(costs.peak_bytes(number, buffers, ppm) <= memory and costs.resident(number, ppm) <= capacity)

    assert fits(ratio) or ratio == PPM
    assert ratio == 0 or not fits(ratio - 1)


@given(memory=st.integers(0, 10**7), offload=st.integers(0, PPM), host=st.integers(0, 10**7))
def test_the_most_tokens_fit_and_one_more_does_not(memory: int, offload: int, host: int) -> None:
    most = room.most_tokens(COSTS, memory, offload, host)
    assert most >= COSTS.most_tokens(memory)
    assert most == 0 or room.fits(COSTS, most, memory, offload, host)
    assert not room.fits(COSTS, most + 1, memory, offload, host)


def test_a_micro_batch_without_tokens_needs_nothing_on_the_host() -> None:
    """Nor is it divided by, where not even the model states fit."""
    assert room.least(COSTS, 0, 0, 0) == 0
