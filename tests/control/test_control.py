"""All ranks get the same answers, and ranks that do not agree find out."""

from __future__ import annotations

from typing import Any

import pytest

from engine.control.control import Control
from engine.errors import PlanError
from tests.world import control, run_world

# Halves at the ends of 64 bits, where a sign could overflow, and digests that differ in one half only.
SAME = ("80" + "00" * 7 + "7f" + "ff" * 7, "00" * 16, "ff" * 16)
OTHER = ("00" * 15 + "01", "01" + "00" * 15, "ff" * 16)


def exchange() -> tuple[Any, ...]:
    here = control()
    for digest in SAME:
        here.check_same(digest)
    said = []
    for digest in OTHER:
        with pytest.raises(PlanError) as caught:
            here.check_same(digest if here.rank == 1 else "00" * 16)
        said.append(str(caught.value))
    largest = here.largest(here.rank, -here.rank, here.rank == 1), here.largest()
    return largest, here.gather({"it": here.rank}), here.gather(here.rank or None), here.gather(None), said


def differently() -> list[str]:
    here, said = control(), []
    for calls in ((lambda: here.gather(1), lambda: here.largest(1)), (lambda: here.largest(1, 2), here.largest)):
        try:
            calls[here.rank % 2]()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.world
def test_all_ranks_get_the_same_answers() -> None:
    largest, gathered, some, none, said = (found := run_world(3, exchange))[0]
    assert found == [found[0]] * 3
    assert largest == ([2.0, 0.0, 1.0], [])
    assert (gathered, some, none) == ([{"it": 0}, {"it": 1}, {"it": 2}], [1, 2], [])
    assert all("rank 1" in one and digest in one for digest, one in zip(OTHER, said, strict=True))


@pytest.mark.world
def test_ranks_that_call_different_collectives_fail() -> None:
    """Rank 1 asks for the maxima of fewer values, and cannot know that others asked for more."""
    first, second = run_world(2, differently)
    assert all("ranks call different collectives" in said for said in (*first, second[0]))
    assert second[1] == ""


def test_a_rank_without_an_agent_is_alone() -> None:
    alone = Control(0)
    alone.check_same(SAME[0])
    assert alone.is_same(SAME[0])
    assert alone.largest(3, 4) == [3.0, 4.0] and alone.gather("x") == ["x"] and alone.gather(None) == []
