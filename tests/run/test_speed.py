from __future__ import annotations

from typing import Any

import pytest

from engine.run.speed import Speed, faster, settled


def steps(*seconds: float, first: int = 1, tokens: int = 100) -> list[dict[str, Any]]:
    return [
        {"step": step, "tokens": tokens + step, "step_s": each, "tokens_per_s": (tokens + step) / each}
        for step, each in enumerate(seconds, start=first)
    ]


@pytest.mark.parametrize(
    ("starts", "counted"),
    [
        ([], [2, 3, 4, 5, 6]),  # of a run whose folder has no record of starts
        ([1], [2, 3, 4, 5, 6]),
        ([1, 4], [2, 3, 5, 6]),
        ([1, 5, 3], [2, 4, 5, 6]),  # the start at 5 went back to a checkpoint; step 5 was run again, warm
        ([1, 9], [2, 3, 4, 5, 6]),
    ],
)
def test_the_first_step_after_each_start_does_not_count(starts: list[int], counted: list[int]) -> None:
    assert [line["step"] for line in settled(steps(*[1.0] * 6), starts)] == counted


def test_a_run_of_first_steps_alone_has_a_speed() -> None:
    assert [line["step"] for line in settled(steps(1.0), [1])] == [1]
    assert settled([], [1]) == [] and Speed.of([], [1]) is None


def test_medians_of_metrics_that_steps_have() -> None:
    lines = steps(9.0, 1.0, 2.0, 4.0)
    lines[1] |= {"mfu": None, "unsplit": 0.25}
    lines[2] |= {"mfu": 0.5, "unsplit": float("nan")}
    found = Speed.of(lines, [1])
    assert found == Speed(2, 4, 103 / 2.0, 2.0, 0.5, 0.25)
    assert Speed.of([{"step": 1, "loss": 2.0}], []) == Speed(1, 1, None, None, None, None)


def test_the_share_of_unsplit_tokens_is_that_of_all_tokens_of_the_steps_that_count() -> None:
    """Neither the median of steps (1.0), nor their mean (0.75): a step of long sequences has more tokens."""
    lines = [
        {"step": 1, "tokens": 900, "unsplit": 0.0},
        *({"step": at, "tokens": 100, "unsplit": 1.0} for at in (2, 3, 4)),
    ]
    found = Speed.of([*lines, {"step": 5, "tokens": 500, "unsplit": 0.0}, {"step": 6, "unsplit": 0.0}], [1])
    assert found is not None and found.unsplit == 300 / 800
    assert getattr(Speed.of([{"step": 1, "tokens": 0, "unsplit": 1.0}], []), "unsplit", 0) is None


def test_runs_are_compared_by_the_time_of_the_same_steps() -> None:
    """Whatever the medians say: here, those of the slow run."""
    slow, fast = steps(50.0, 3.0, 3.0, 30.0, 7.0), steps(99.0, 4.0, 4.0, 4.0)
    for runs, (first, second) in (((slow, fast), (1, 0)), ((fast, slow), (0, 1))):
        found = faster([(lines, [1]) for lines in runs], ["static", "adaptive"])
        assert found is not None
        assert (found.fast, found.slow, found.steps) == (first, second, [2, 3, 4])
        assert found.seconds == (12.0, 36.0) and found.ratio == 3.0


def test_steps_of_other_tokens_are_not_the_same() -> None:
    found = faster([(steps(1.0, 4.0, 4.0), []), (steps(1.0, 1.0, 1.0, tokens=97), [])], ["adaptive", "adaptive"])
    assert found is not None and (found.fast, found.seconds, list(found.steps)) == (1, None, [])
    assert found.ratio == pytest.approx(99.5 * 4 / 102.5)


def test_of_several_runs_the_best_is_compared_with_the_best_static_one() -> None:
    runs = [(steps(1.0, each, each), [1]) for each in (8.0, 4.0, 2.0, 1.0)]
    found = faster(runs, ["static", "static", "adaptive", "balanced"])
    assert found is not None and (found.fast, found.slow, found.ratio) == (3, 1, 4.0)
    found = faster(runs, ["adaptive"] * 4)
    assert found is not None and (found.fast, found.slow, found.ratio) == (3, 0, 8.0)


def test_one_run_with_steps_is_compared_with_nothing() -> None:
    assert faster([(steps(1.0), [1]), ([], [])], ["adaptive", "static"]) is None
