"""Hangs are found, with the rank that is furthest behind; ranks that get on are never taken for hanging."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from engine.control.progress import PHASES
from engine.launch.agents.patience import Patience, Place

BEAT_S = 1.0


class World:
    """Ranks that run the parts of steps, and beats that reach the launcher each second."""

    def __init__(self, ranks: int) -> None:
        self.now = 0.0
        self.patience = Patience(lambda: self.now)
        self.at: dict[int, tuple[Place | None, float]] = dict.fromkeys(range(ranks), (None, 0.0))
        self.entered = dict.fromkeys(range(ranks), 0)
        self.planned_s: float | None = None
        self.measured: tuple[int, float, float] | None = None
        self._beaten = 0.0

    def beat(self) -> None:
        for rank, (place, since) in self.at.items():
            self.patience.note(rank, place, since, self.entered[rank])
            self.patience.expect(rank, self.planned_s, self.measured)

    def sleep(self, seconds: float) -> None:
        """Let time pass, with a beat each second. Asserts that no hang is seen."""
        end = self.now + seconds
        while self._beaten + BEAT_S <= end:
            self.now = self._beaten = self._beaten + BEAT_S
            self.beat()
            assert self.patience.hang() is None
        self.now = end

    def moves(self, rank: int, *place: object) -> None:
        self.at[rank] = (place, self.now)  # type: ignore[assignment]

    def steps(self, *seconds: float, first: int = 1, micros: int = 2, planned: float = 1.0, after: float = 0.0) -> None:
        """Let all ranks run steps of these lengths, which are `planned` times as long as the hardware takes.

        Each is followed by a checkpoint that takes `after` seconds.
        """
        for step, length in enumerate(seconds, start=first):
            began, self.planned_s = self.now, planned * length
            parts = [("plan", 0)]
            for micro in range(micros):
                parts += [("data", micro), ("forward", micro), ("backward", micro)]
            parts += [("update", 0)]
            for phase, part in parts:
                self.all_move(step, phase, part)
                self.sleep(length / len(parts))
            self.all_move(step, "log", 0)
            self.measured = step, self.planned_s, self.now - began
            if after:
                self.all_move(step, "save", 0)
                self.sleep(after)

    def all_move(self, *place: object) -> None:
        for rank in self.at:
            self.moves(rank, *place)

    def hangs_after(self) -> float:
        """Let nothing move any more; return after how many seconds that is a hang."""
        began = self.now
        while self.patience.hang() is None:
            self.now += 0.5
            self.beat()
        return self.now - began


@given(
    st.floats(0.01, 300),
    st.lists(st.floats(0.1, 9), min_size=2, max_size=6),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 1000),
)
def test_steps_of_varying_length_are_no_hang(
    usual: float, factors: list[float], ranks: int, micros: int, first: int
) -> None:
    """Not even one that takes nine times as long as the longest before, in one piece; and compiling at first."""
    world = World(ranks)
    world.steps(1700, usual, usual, usual, first=first, micros=micros)
    for step, factor in enumerate(factors, start=first + 4):
        for rank in world.at:
            world.moves(rank, step, "forward", 0)
        world.sleep(factor * usual)
        world.steps(usual, first=step, micros=micros)


@given(st.randoms(use_true_random=False), st.integers(2, 6))
def test_the_rank_furthest_behind_is_named(drawn: random.Random, ranks: int) -> None:
    order = [
        (step, phase, part)
        for step in (4, 5)
        for phase, part in (
            ("plan", 0),
            ("data", 0),
            ("forward", 0),
            ("backward", 0),
            ("data", 1),
            ("forward", 1),
            ("backward", 1),
            ("data", 2),
            ("update", 0),
            ("log", 0),
            ("validate", 0),
            ("validate", 1),
            ("save", 0),
        )
    ]
    world = World(ranks)
    world.steps(1, 1, 1, 1)
    places = sorted(drawn.sample(range(len(order)), ranks))
    numbers = drawn.sample(range(ranks), ranks)
    for place, rank in zip(places, numbers, strict=True):
        world.moves(rank, *order[place])
    world.hangs_after()
    hang = world.patience.hang()
    assert hang is not None and hang.rank == numbers[0]
    assert f"rank {hang.rank} is in {world.patience.where(hang.rank)}; others are in step" in hang.message


def test_a_hang_is_found_soon_after_short_and_long_steps() -> None:
    for length, expected in ((0.05, 60), (0.5, 60), (5, 60), (30, 300)):
        world = World(2)
        world.steps(*[length] * max(30, int(6 / length)))
        found = world.hangs_after()
        assert expected * 0.8 <= found <= expected * 1.3, length


@given(st.floats(0.01, 1000), st.floats(2, 5), st.floats(1, 50), st.lists(st.floats(0.5, 2), min_size=3, max_size=6))
def test_a_step_may_take_as_long_as_its_plan_says(
    planned: float, short: float, times: float, factors: list[float]
) -> None:
    """Also the first long one: documents of 2M after those of 1K. The plan's seconds are of any hardware."""
    world = World(2)
    world.steps(*[short * factor for factor in (9, *factors)], planned=planned)
    world.planned_s = planned * short * times
    world.all_move(len(factors) + 2, "reduce", 0)
    world.sleep(9 * short * times)
    limit = world.hangs_after() + 9 * short * times
    assert limit <= 1 + max(60, 10 * short * max(*factors, times))


def test_the_time_that_a_long_step_should_take_is_in_the_message() -> None:
    world = World(2)
    world.steps(9, 9, 9, 9, planned=0.5)
    world.planned_s = 0.5 * 133
    world.all_move(5, "reduce", 0)
    assert 1330 <= world.hangs_after() < 1332
    hang = world.patience.hang()
    known = (
        "no rank has made progress for 1330 s (the longest of the last steps took 9.0 s, this one should take 133.0 s)"
    )
    assert hang is not None and hang.message == f"{known}: rank 0 is in step 5 (reduce), as are all others"


def test_one_step_that_stalls_does_not_stretch_the_limit_of_a_long_one() -> None:
    world = World(2)
    world.steps(9, 9, 9)
    world.planned_s, world.measured = 9, (4, 9.0, 300.0)
    world.beat()
    world.steps(9, 9, first=5)
    world.planned_s = 900
    world.all_move(7, "forward", 0)
    assert 9000 <= world.hangs_after() < 9002


def test_checkpoints_between_steps_do_not_stretch_the_limit() -> None:
    world = World(2)
    world.steps(5, 5, 5, 5, 5, after=600)
    world.all_move(6, "forward", 0)
    assert 58 <= world.hangs_after() < 62


def test_ranks_that_have_not_entered_a_collective_are_named() -> None:
    def message(*places: tuple[object, ...], entered: dict[int, int] | None = None) -> str:
        world = World(len(places))
        world.steps(1, 1, 1, 1)
        for rank, place in enumerate(places):
            world.moves(rank, *place)
        world.entered |= entered or {}
        world.hangs_after()
        hang = world.patience.hang()
        assert hang is not None
        return hang.message.partition(": ")[2]

    reduce, backward = (5, "reduce", 0), (5, "backward", 1)
    behind = "rank 1 is in step 5 (backward, pass 1); others are in step 5 (reduce)"
    assert message(reduce, backward, reduce) == f"{behind}; the collective of reduce waits for rank 1"
    behind = "rank 0 is in step 5 (backward, pass 1); others are in step 5 (reduce)"
    of_many = "; the collective of reduce waits for ranks 0, 1, 2, 3, 4 and 3 more"
    assert message(*[backward] * 8, *[reduce] * 8) == behind + of_many
    assert message(reduce, reduce) == "rank 0 is in step 5 (reduce), as are all others"
    # Rank 1 waits for its plan, and the others compare theirs.
    same = "rank 1 is in step 5 (plan), as are all others; the collective of plan waits for rank 1"
    assert message(*[(5, "plan", 0)] * 3, entered={0: 9, 1: 8, 2: 9}) == same
    # Rings are not among them.
    assert "collective" not in message((5, "forward", 1), (5, "forward", 0))


def test_while_ranks_start_read_or_save_they_may_take_longer() -> None:
    world = World(2)
    assert world.patience.hang() is None
    world.moves(0, 0, "start", 0)
    assert 1800 <= world.hangs_after() < 1810
    hang = world.patience.hang()
    assert hang is not None and hang.message.endswith("rank 0 is in its start, as are all others")
    for phase, seconds in (("plan", 600), ("data", 600), ("validate", 600), ("save", 1800)):
        world = World(2)
        world.steps(1, 1, 1, 1)
        world.moves(1, 5, phase, 0)
        assert seconds <= world.hangs_after() < seconds + 10, phase


def test_ranks_that_report_nothing_are_never_judged() -> None:
    """Those that measure the machine."""
    world = World(2)
    world.sleep(5000)


def test_ranks_that_have_ended_are_not_behind() -> None:
    world = World(3)
    world.steps(1, 1, 1, 1)
    world.moves(0, 4, "save", 0)
    world.moves(1, 5, "forward", 0)
    world.moves(2, 5, "forward", 0)
    world.sleep(2)
    world.patience.forget(0)
    del world.at[0]
    world.hangs_after()
    hang = world.patience.hang()
    assert hang is not None and hang.rank == 1 and "save" not in hang.message


def test_places_are_described() -> None:
    patience = Patience(lambda: 0.0)
    assert patience.where(0) == "" and not patience.begun
    patience.note(0, None, 0)
    assert patience.where(0) == "its start" and not patience.begun
    described = {}
    for phase in PHASES[1:]:
        patience.note(0, (3, phase, 2), 0)
        described[phase] = patience.where(0)
    assert described["forward"] == "step 3 (forward, pass 2)"
    assert described["save"] == "step 3 (save)"
    assert patience.begun
