from __future__ import annotations

import pytest

from engine.hardware.cases import cases


@pytest.mark.parametrize("longest", [1024, 16384])
def test_no_rank_holds_more_than_the_longest(longest: int) -> None:
    found = cases(2, 1, 2, longest)
    assert max(sum(case.whole) + sum(case.shared) for case in found) <= longest
    assert all(case.whole or case.shared for case in found)
    assert len(set(found)) == len(found)


def test_every_term_shows_somewhere() -> None:
    """One sequence of several lengths, several sequences, other layers, rings, and a ring beside whole sequences."""
    found = cases(2, 1, 2, 1024)
    assert {case.whole for case in found} >= {(32,), (1024,), (32,) * 16, (128,) * 4}
    assert {case.layers for case in found} == {1, 2}
    assert {case.shared for case in found} >= {(32,), (1024,)}
    assert any(case.shared and case.whole for case in found)


def test_one_rank_has_no_rings() -> None:
    assert not any(case.shared for case in cases(2, 1, 1, 16384))


def test_a_model_of_one_layer_has_no_second_number_of_layers() -> None:
    assert {case.layers for case in cases(1, None, 2, 1024)} == {1}
