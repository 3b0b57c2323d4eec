"""All ranks get the same answers, and ranks that do not agree find out."""

from __future__ import annotations

import threading
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


def from_threads() -> tuple[Any, ...]:
    """Share and collect under one name in a thread, while the main thread reduces."""
    here, found = control(), dict[str, Any]()

    def work() -> None:
        found["shared"] = here.share("step", f"of {here.rank}")
        found["collected"] = here.collect("step", here.rank)

    thread = threading.Thread(target=work)
    thread.start()
    largest = [here.largest(here.rank) for _ in range(3)]
    thread.join()
    return largest, found


@pytest.mark.world
def test_threads_may_share_and_collect_beside_collectives() -> None:
    shared = {rank: f"of {rank}" for rank in range(2)}
    for rank, (largest, found) in enumerate(run_world(2, from_threads)):
        assert largest == [[1.0]] * 3
        assert found == {"shared": shared, "collected": [] if rank else [0, 1]}


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
    assert alone.share("step", "x") == {0: "x"} and alone.collect("step", "x") == ["x"]
