from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.data.sequences import fitting, piece_bounds
from tests.planner.samples import ints


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 60))
def test_fitting_takes_at_least_one(lengths: list[int], tokens: int) -> None:
    count = fitting(np.array(lengths), tokens)
    assert count == 1 or sum(lengths[:count]) <= tokens
    assert count == len(lengths) or sum(lengths[: count + 1]) > tokens


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 9))
def test_every_input_is_in_exactly_one_piece(lengths: list[int], context: int) -> None:
    owner, start, length = (part.tolist() for part in piece_bounds(ints(*lengths), context))
    found = [
        (of, at) for of, first, count in zip(owner, start, length, strict=True) for at in range(first, first + count)
    ]
    assert found == [(of, at) for of, inputs in enumerate(lengths) for at in range(inputs)]
    assert all(0 < count <= context for count in length)
