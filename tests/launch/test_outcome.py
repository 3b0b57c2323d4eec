"""How a run reports its beginning and its end. A page that fails changes no outcome."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.load import load
from engine.data.overview import Corpora
from engine.data.steps import Cursor
from engine.job import Job
from engine.launch import outcome, supervise
from engine.launch.agents.ranks import PreemptedError
from engine.launch.run import train
from engine.run import launches
from engine.run.checkpoints import TrainState
from engine.run.compatibility import must_match
from engine.run.folder import RunFolder
from engine.run.metrics import append
from tests.launch.starts import config, finished, saved
from tests.run.damage import write_all


def test_a_run_ends_with_the_median_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as `runs list` and its page show; without steps there is none."""
    monkeypatch.setattr(outcome, "write_page", lambda folder, say: None)
    said, folder = list[str](), RunFolder(tmp_path)
    launch: Any = SimpleNamespace(job=Job(load([])), folder=folder, say=said.append)
    start: Any = SimpleNamespace(step=0, plans=False, corpora=SimpleNamespace(overview=None))
    assert outcome.outcome(launch, start)["train"]["tokens_per_s"] is None and said == []
    launches.begin(folder.launches, 1, 2, ["a"])
    for step, rate in enumerate((1.0, 500.0, 700.0), start=1):
        append(
            folder.metrics, {"step": step, "loss": 2.5, "tokens": 8, "tokens_per_s": rate, "mfu": 0.5, "unsplit": 0.25}
        )
    found = outcome.outcome(launch, start)["train"]
    assert (found["tokens_per_s"], found["mfu"], found["unsplit"]) == (600.0, 0.5, 0.25)
    assert len(said) == 1 and said[0].startswith("600 tokens/s") and "MFU 50.0%" in said[0]


def test_a_warm_up_that_never_ends_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps, expected in (
        (19, ["optimizer.warmup_steps=20 is more than run.steps=19: optimizer.lr is never reached"]),
        (20, []),
    ):
        said: list[str] = []
        finished(tmp_path, monkeypatch, steps)
        train(config(tmp_path, f"run.steps={steps}"), resume="never", say=said.append)
        assert [line for line in said if "warmup" in line] == expected


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(28, "No space left on device", "r.html"), "r.html: No space left on device"),
    ],
)
def test_a_report_that_the_disk_has_no_space_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, why: str
) -> None:
    def full(folder: Path) -> Path:
        raise error

    settings, said = finished(tmp_path, monkeypatch, 2), list[str]()
    monkeypatch.setattr("engine.report.run_page.write_report", full)
    train(settings, say=said.append)
    assert f"the report could not be written: {why}" in said


def test_a_failing_report_is_reported_and_changes_no_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    result = train(finished(tmp_path, monkeypatch, 2), say=said.append)["train"]
    assert (result["steps"], result["loss"], result["report"]) == (2, 3.0, None)
    assert "the report could not be written: ValueError: no fonts" in said
    with pytest.raises(PreemptedError):
        train(finished(tmp_path, monkeypatch, 1, PreemptedError("stopped")), resume="never", say=said.append)
    assert said[-1] == "the report could not be written: ValueError: no fonts"


def test_lost_metrics_of_a_finished_run_are_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = finished(tmp_path, monkeypatch, 0)
    result = train(settings, resume=str(saved(tmp_path, settings)), say=lambda line: None)["train"]
    assert (result["steps"], result["loss"], result["validation_loss"]) == (1, None, None)


def test_a_lost_last_line_is_reported_and_no_older_loss_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of an older step is not the result of the run."""
    settings, said = finished(tmp_path, monkeypatch, 0), list[str]()
    saved(tmp_path / "run" / "checkpoints", settings, 2)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    result = train(settings, say=said.append)["train"]
    assert (result["steps"], result["loss"]) == (2, None)
    assert [line for line in said if "metrics.jsonl:2: this line is damaged" in line]


def test_a_damaged_file_of_a_finished_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, said = config(tmp_path, "run.steps=1"), list[str]()
    saved(tmp_path / "run" / "checkpoints", settings)
    append(tmp_path / "run" / "metrics.jsonl", {"step": 1, "loss": 3.0})
    for name in ("plan.bin", "trace.json"):
        (tmp_path / "run" / name).write_bytes(b"\0" * 40)
    assert train(settings, say=said.append)["train"]["steps"] == 1
    assert [line for line in said if f"report could not be written: {tmp_path}/run/plan.bin: is damaged: " in line]


def test_a_run_that_ends_for_want_of_documents_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, settings = list[str](), config(tmp_path, "run.steps=90", "data.exhausted=stop")
    steps, cursor = Corpora(settings).steps, Cursor()
    while (found := steps.next(cursor)) is not None:
        cursor = found[1]
    last, root = cursor.step, tmp_path / "run"

    def run_ranks(commands: object, folder: RunFolder, *rest: object) -> None:
        append(folder.metrics, {"step": last, "loss": 3.0, "ended": "all were used"})

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, say=said.append)
    ended = f"{root}: the run ended after step {last} of run.steps=90: all were used"
    assert [line for line in said if "ended after" in line] == [ended]

    state = TrainState(last, cursor.to_json(), 2, Corpora(settings).fingerprints, must_match(settings))
    write_all(root / "checkpoints", state)
    said.clear()
    monkeypatch.setattr(supervise, "run_ranks", lambda *rest: pytest.fail("there is nothing to train"))
    train(settings, say=said.append)
    why = "all documents were used; set data.exhausted=repeat to use them again"
    left = f"{root}: nothing left to train after step {last}: {why}"
    assert [line for line in said if "nothing left" in line or "ended after" in line] == [left]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.exhausted=stop"], "stop the run"),
        (["data.sources.web.exhausted=repeat", "data.sources.code.exhausted=repeat"], "repeat them"),
        (["data.exhausted=drop", "data.sources.web.exhausted=repeat"], "repeat them (web), drop the source (code)"),
    ],
)
def test_a_run_says_what_happens_when_a_source_has_been_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], expected: str
) -> None:
    """Sources for validation alone are not trained on, so their policy does not matter."""
    finished(tmp_path, monkeypatch, 2)
    said = list[str]()
    if any("sources" in one for one in overrides):
        places = [f"data.sources.{name}.path={tmp_path / 'data'}" for name in ("web", "code", "held")]
        overrides = [*overrides, *places, "data.sources.held.exhausted=drop", "data.mix={web: 3, code: 1, held: 0}"]
    train(config(tmp_path, "run.steps=2", *overrides), say=said.append)
    line = f"when all documents of a source were used (data.exhausted): {expected}"
    assert [one for one in said if one.startswith("when all documents")] == [line]


def test_output_that_fails_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(line: str) -> None:
        raise BrokenPipeError

    assert train(finished(tmp_path, monkeypatch, 2), say=broken)["train"]["steps"] == 2
