from __future__ import annotations

import pytest

from engine.data.transforms.drop import Drop, drop
from tests.data.transforms.pieces import of_ids, of_text


@pytest.mark.parametrize(
    ("shorter", "longer", "kept"),
    [
        (4, None, [4, 5, 6, 7]),
        (None, 5, [2, 3, 4, 5]),
        (4, 5, [4, 5]),
        (5, 5, [5]),
    ],
)
def test_lengths_are_inputs_as_in_plans_and_bounds_are_kept(
    shorter: int | None, longer: int | None, kept: list[int]
) -> None:
    options = Drop(shorter=shorter, longer=longer)
    texts = [drop(of_text(b"x" * (inputs - 1)), options) for inputs in range(2, 8)]
    assert [one.inputs for found in texts for one in found] == kept
    ids = [drop(of_ids(*range(inputs + 1)), options) for inputs in range(2, 8)]
    assert [one.inputs for found in ids for one in found] == kept


def test_what_is_kept_is_not_changed() -> None:
    piece = of_text(b"text")
    assert drop(piece, Drop(shorter=2)) == [piece]
