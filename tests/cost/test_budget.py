from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.cost import budget
from engine.cost.budget import Budget
from engine.units import PPM
from tests.planner.samples import COSTS, ints

tokens_of = st.integers(1, 2**20)


@given(tokens=tokens_of, uneven=st.integers(0, 200), capacity=tokens_of, away=st.integers(0, PPM))
def test_the_least_ratio_fits_and_less_does_not(tokens: int, uneven: int, capacity: int, away: int) -> None:
    """With buffers of more tokens than the micro-batch's own: its rings' largest shards lie on other ranks."""
    number, buffers = ints(tokens), ints(tokens + uneven)
    memory = COSTS.peak_bytes(number, buffers, away)
    (ratio,) = budget.least_ratio(COSTS, number, buffers, ints(capacity), memory).tolist()

    def fits(ppm: int) -> bool:
        return bool(COSTS.peak_bytes(number, buffers, ppm) <= memory and COSTS.resident(number, ppm) <= capacity)

    assert fits(ratio) or ratio == PPM
    assert ratio == 0 or not fits(ratio - 1)


tenths = st.integers(0, 10).map(lambda tenth: tenth * PPM // 10)
budgets = st.builds(Budget, st.integers(0, 10**7), st.integers(0, 10**7), tenths, tenths)


@given(has=budgets, capacity=st.none() | st.integers(0, 2**14))
def test_the_most_tokens_fit_and_one_more_does_not(has: Budget, capacity: int | None) -> None:
    most = budget.most_tokens(COSTS, has, capacity)
    assert most == 0 or budget.fits(COSTS, most, has, capacity)
    assert not budget.fits(COSTS, most + 1, has, capacity)


@given(has=budgets, tokens=st.integers(1, 2**14), capacity=st.none() | st.integers(0, 2**14))
def test_tokens_fit_where_any_ratio_lets_them(has: Budget, tokens: int, capacity: int | None) -> None:
    """Against every ratio in steps of a ten thousandth, so the searched one may fit where none of those does."""
    number, stays = ints(tokens), tokens if capacity is None else capacity
    tried = np.arange(0, has.offload + 1, PPM // 10_000)
    good = (
        (COSTS.peak_bytes(number, number, tried) <= has.memory)
        & (COSTS.resident(number, tried) <= stays)
        & (COSTS.host_bytes(number, np.maximum(has.named, tried)) <= has.host)
    )
    found = budget.fits(COSTS, tokens, has, capacity)
    assert found or not good.any()
    if found and not good.any():
        assert min(has.offload, budget.least(COSTS, tokens, stays, has.memory)) % (PPM // 10_000)


@given(memory=st.integers(0, 10**7))
def test_without_offload_it_is_what_the_costs_say(memory: int) -> None:
    assert budget.most_tokens(COSTS, Budget(memory, 0, 0)) == COSTS.most_tokens(memory)


def test_a_micro_batch_without_tokens_needs_nothing_on_the_host() -> None:
    """Nor is it divided by, where not even the model states fit."""
    assert budget.least(COSTS, 0, 0, 0) == 0


@given(tokens=tokens_of, host=st.integers(0, 10**7))
def test_the_most_ratio_fits_the_host_and_more_does_not(tokens: int, host: int) -> None:
    number = ints(tokens)
    (ratio,) = budget.most_ratio(COSTS, number, host).tolist()
    assert COSTS.host_bytes(number, ratio)[0] <= host
    assert ratio == PPM or COSTS.host_bytes(number, ratio + 1)[0] > host
