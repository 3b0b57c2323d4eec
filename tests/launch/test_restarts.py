"""A run goes on by itself only where that may help."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ExitCode, PreflightError
from engine.launch.agents.ranks import RankError
from engine.launch.restarts import Restart, Restarts, StuckError
from engine.run import metrics
from engine.run.folder import RunFolder
from tests.refusals import refused


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def done(folder: RunFolder, step: int) -> None:
    metrics.append(folder.metrics, {"step": step, "loss": 1.0})


def failure(folder: RunFolder, code: int = 137) -> RankError:
    return RankError("rank 1 was killed", code, folder.log(1), "run it again", 1, "localhost")


def test_it_counts_to_the_limit(folder: RunFolder) -> None:
    restarts = Restarts(2, folder)
    for number in (1, 2):
        done(folder, 10 * number)
        assert restarts.after(failure(folder), start=0) == Restart(f"rank 1 was killed; restart {number} of 2")
    done(folder, 30)
    with pytest.raises(RankError):
        restarts.after(failure(folder), start=0)


def test_a_failure_before_any_step_is_final(folder: RunFolder) -> None:
    """A rank that cannot import a library would fail at each start."""
    for before in (0, 7):
        if before:
            done(folder, before)
        with pytest.raises(RankError):
            Restarts(3, folder).after(failure(folder), start=before)


def test_a_step_that_fails_three_times_ends_the_run(folder: RunFolder) -> None:
    restarts = Restarts(9, folder)
    done(folder, 4)
    for _ in range(2):  # the second time, no step has been finished since the start
        restarts.after(failure(folder), start=3)
    with refused(StuckError, folder.log(1), code=93) as problems:
        restarts.after(failure(folder), start=4)
    assert "step 5 " in problems[0].message and "rank 1 was killed" in problems[0].message
    assert problems[0].hint == "run it again"


@pytest.mark.parametrize("code", [2, 3, 4, 5, 10, 73, 74])
def test_mistakes_and_conditions_that_stay_are_final(folder: RunFolder, code: int) -> None:
    done(folder, 4)
    with pytest.raises(RankError) as caught:
        Restarts(3, folder).after(failure(folder, code), start=0)
    assert caught.value.code == code


def test_a_host_that_is_away_for_a_while_costs_restarts_and_time(folder: RunFolder) -> None:
    """ssh gives up after 20 s, and a network may be down for longer; a host takes minutes to reboot."""
    restarts, absent = Restarts(3, folder), PreflightError("beta cannot be reached")
    lost = failure(folder, ExitCode.HANG)
    with pytest.raises(PreflightError):
        restarts.after(absent, start=0)  # it has never been there
    done(folder, 4)
    restarts.after(lost, start=0)
    assert restarts.after(absent, start=3) == Restart("beta cannot be reached; restart 2 of 3 in 10 s", 10.0)
    assert restarts.after(absent, start=3) == Restart("beta cannot be reached; restart 3 of 3 in 30 s", 30.0)
    with pytest.raises(RankError) as caught:
        restarts.after(absent, start=3)
    assert caught.value is lost and caught.value.__cause__ is absent


def test_a_run_that_was_asked_to_stop_does_not_start_again(folder: RunFolder) -> None:
    """A rank may fail while it saves the checkpoint that was asked for."""
    done(folder, 4)
    error = failure(folder)
    error.asked = True
    with pytest.raises(RankError):
        Restarts(3, folder).after(error, start=0)


def test_without_restarts_every_failure_is_final(folder: RunFolder) -> None:
    done(folder, 4)
    with pytest.raises(RankError):
        Restarts(0, folder).after(failure(folder, ExitCode.HANG), start=0)


def test_a_host_whose_gpus_fail_twice_is_not_tried_until_the_step_is_stuck(folder: RunFolder) -> None:
    """A new process does without a bad page of memory, so one failure is no reason to end the run."""
    restarts = Restarts(9, folder)
    done(folder, 4)

    def broken(host: str) -> RankError:
        return RankError("GPU 3 has failed", ExitCode.PREFLIGHT, folder.log(1), "hint", 1, host, hardware=True)

    assert restarts.after(broken("gpu-a"), start=0).line == "GPU 3 has failed; restart 1 of 9"
    done(folder, 9)
    restarts.after(broken("gpu-b"), start=4)
    done(folder, 12)
    with refused(RankError, folder.log(1), code=3, host="gpu-a"):
        restarts.after(broken("gpu-a"), start=9)
