"""Each start of the ranks has an end in the record of the run, whatever ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load
from engine.errors import BytescaleError, ExitCode, PreflightError
from engine.launch import supervise
from engine.launch.agents.ranks import PreemptedError, RankError
from engine.launch.run import train
from engine.run import metrics
from engine.run.folder import RunFolder
from engine.run.launches import read_launches
from tests.run.damage import save

SMALL = ("context=256", "capacity=128", "batch_tokens=1K", "run.steps=3", "model.layers=1")


def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *failures: BytescaleError) -> tuple[BytescaleError, int]:
    """Train with starts that finish a step and fail with these errors; return the run's error and count its pages."""
    (tmp_path / "data").mkdir()
    for number in range(12):
        (tmp_path / "data" / f"{number}.py").write_text(f"print({number})\n" * 40)
    pages, left = list[Path](), iter(failures)

    def run_ranks(commands: object, folder: RunFolder, *rest: object) -> None:
        metrics.append(folder.metrics, {"step": 1, "loss": 1.0})
        raise next(left)

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    monkeypatch.setattr(supervise, "write_page", lambda folder, say: pages.append(folder.root))
    with pytest.raises(BytescaleError) as caught:
        train(load([*SMALL, f"data.path={tmp_path / 'data'}", f"run.out={tmp_path / 'run'}"]), say=lambda line: None)
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
