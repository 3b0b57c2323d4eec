"""Each start of the ranks has an end in the record of the run, whatever ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import BytescaleError, ExitCode, PreflightError
from engine.launch import supervise
from engine.launch.agents.commands import NodeCommand
from engine.launch.agents.ranks import PreemptedError, RankError
from engine.launch.run import train
from engine.run.checkpoints import newest_first
from engine.run.folder import RunFolder
from engine.run.launches import read_launches
from engine.run.metrics import append
from tests.launch.starts import config, finished, saved
from tests.refusals import refused
from tests.run.damage import save


def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *failures: BytescaleError) -> tuple[BytescaleError, int]:
    """Train with starts that finish a step and fail with these errors; return the run's error and count its pages."""
    pages, left = list[Path](), iter(failures)

    def run_ranks(commands: object, folder: RunFolder, *rest: object) -> None:
        append(folder.metrics, {"step": 1, "loss": 1.0})
        raise next(left)

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    monkeypatch.setattr(supervise, "write_page", lambda folder, say: pages.append(folder.root))
    with pytest.raises(BytescaleError) as caught:
        train(config(tmp_path, "run.steps=3", "model.layers=1"), say=lambda line: None)
    assert next(left, None) is None
    return caught.value, len(pages)


def outcomes(tmp_path: Path) -> list[str]:
    launches = read_launches(tmp_path / "run" / "launches.jsonl")
    assert all(launch.ended is not None for launch in launches)
    return [launch.outcome for launch in launches]


def test_a_host_that_cannot_be_reached_at_the_first_start_is_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent, cause = PreflightError("beta has not answered for 60 s"), FileNotFoundError("ssh")
    absent.__cause__ = cause
    error, pages = ended(tmp_path, monkeypatch, absent)
    assert error is absent and error.__cause__ is cause and pages == 1
    assert outcomes(tmp_path) == ["beta has not answered for 60 s"]


def test_a_host_that_is_gone_at_a_restart_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()
    monkeypatch.setattr(supervise.time, "sleep", waited.append)
    lost = RankError("beta was lost", ExitCode.HANG, tmp_path / "log", "", 1, "beta")
    absent = PreflightError("beta has not answered for 60 s")
    error, pages = ended(tmp_path, monkeypatch, lost, absent, absent, absent)
    assert error is lost and error.__cause__ is absent and pages == 1
    assert outcomes(tmp_path) == ["beta was lost", *["beta has not answered for 60 s"] * 3]
    assert waited == [0, 10, 30]


def test_a_request_to_stop_between_two_starts_ends_the_run_as_one_while_ranks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(seconds: float) -> None:
        save(tmp_path / "run" / "checkpoints", 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(supervise.time, "sleep", asked)
    lost = RankError("beta was lost", ExitCode.HANG, tmp_path / "log", "", 1, "beta")
    error, _ = ended(tmp_path, monkeypatch, lost)
    assert isinstance(error, PreemptedError) and error.code == ExitCode.PREEMPTED


def damage_found(folder: RunFolder, *arguments: object) -> None:
    """Stand in for ranks that find damage in their parts of the checkpoint."""
    raise RankError("checkpoint is damaged", ExitCode.NO_CHECKPOINT, folder.log(1), "see its log", 1, "localhost")


def test_damage_that_ranks_find_leads_to_the_newest_intact_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, started, said = config(tmp_path), list[Path](), list[str]()
    old, damaged = (saved(tmp_path / "run" / "checkpoints", settings, step) for step in (1, 2))
    (damaged / "a").write_bytes(bytes((damaged / "a").stat().st_size))

    def run_ranks(commands: object, folder: RunFolder, *rest: object) -> None:
        started.append(newest_first(folder.checkpoints)[0])
        if len(started) == 1:
            damage_found(folder)

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, say=said.append)
    assert started == [damaged, old], "the damaged one has been renamed"
    (line,) = [line for line in said if "damaged" in line]
    assert line == "warning: step-00000002 is damaged (a does not match its hash); using step-00000001 instead"
    assert len(list(damaged.parent.glob("abandoned-step-00000002-*"))) == 1


@pytest.mark.parametrize("resume", ["never", "path"])
def test_damage_in_a_checkpoint_of_its_own_does_not_take_a_run_back_to_where_it_began(
    resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, began = config(tmp_path), list[str]()
    asked = str(saved(tmp_path / "other", settings)) if resume == "path" else resume

    def run_ranks(commands: list[NodeCommand], folder: RunFolder, *rest: object) -> None:
        began.append(Path(commands[0].work.ranks[0][1][-1]).name)
        if len(began) == 1:
            for step in (2, 3):
                append(folder.metrics, {"step": step, "loss": 3.0})
                newest = saved(folder.checkpoints, settings, step)
            (newest / "a").write_bytes(bytes((newest / "a").stat().st_size))
            raise RankError("rank 1 was killed", 137, folder.log(1), "run it again", 1, "localhost")
        if len(began) == 2:
            damage_found(folder)

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, resume=asked, say=lambda line: None)
    first = "run" if resume == "never" else "step-00000001"
    assert began == [first, "step-00000003", "step-00000002"]


def test_damage_that_only_the_ranks_see_ends_the_run_after_a_second_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, started, said = config(tmp_path), list[object](), list[str]()
    folder = RunFolder(tmp_path / "run")
    saved(folder.checkpoints, settings)

    def run_ranks(commands: object, folder: RunFolder, *rest: object) -> None:
        started.append(commands)
        damage_found(folder)

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    with refused(RankError, folder.log(1), code=5, rank=1):
        train(settings, say=said.append)
    assert len(started) == 2
    assert any(line.endswith("the launcher finds no damage and retries") for line in said)


def test_each_start_is_recorded_with_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = finished(tmp_path, monkeypatch, 1, PreemptedError("stopped on request"))
    with pytest.raises(PreemptedError):
        train(settings, say=lambda line: None)
    finished(tmp_path, monkeypatch, 2)
    train(settings, say=lambda line: None)
    first, second = read_launches(RunFolder(tmp_path / "run").launches)
    assert (first.step, first.ranks, first.hosts, first.outcome) == (1, 2, ["localhost"], "stopped on request")
    assert second.outcome == "" and first.ended is not None and second.ended is not None
    assert first.began <= first.ended <= second.began <= second.ended
