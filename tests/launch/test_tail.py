"""What a run says of the metrics that its ranks write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.data.quarantine import MOST
from engine.launch import supervise
from engine.launch.run import train
from engine.launch.tail import MetricsTail, left_out_so_far
from engine.run.folder import RunFolder
from engine.run.metrics import append
from tests.launch.starts import config, finished


def test_a_resumed_run_shows_each_new_step_once_even_if_old_lines_were_lost(tmp_path: Path) -> None:
    path, shown = tmp_path / "metrics.jsonl", []
    append(path, {"step": 7})  # steps 1 to 6 are lost
    tail = MetricsTail(RunFolder(tmp_path), config(tmp_path), shown.append, print)
    tail()
    assert shown == []
    for step in (8, 9):
        append(path, {"step": step})
        tail()
    tail()
    assert shown == [{"step": 8}, {"step": 9}]


def test_documents_that_were_left_out_are_reported_when_their_number_has_doubled_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, said = finished(tmp_path, monkeypatch, 0), list[str]()

    def run_ranks(commands: object, folder: RunFolder, tick: Callable[[], None], *rest: object) -> None:
        for step, left_out in enumerate((0, 0, 1, 1, 2, 3, 5), start=1):
            append(folder.metrics, {"step": step, "loss": 3.0, **({"left_out": left_out} if left_out else {})})
            tick()

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, say=said.append)
    file = tmp_path / "run" / "quarantine.jsonl"
    assert [line for line in said if "left out" in line] == [
        f"warning: 1 document could not be used and was left out; see {file}",
        f"warning: 2 documents could not be used and were left out; see {file}",
        f"warning: 5 documents could not be used and were left out; see {file}",
        f"5 documents could not be used and were left out; see {file}",
    ]
    assert left_out_so_far(MOST, RunFolder(tmp_path)).startswith("at least 10,000 documents could not be used")


def test_skipped_steps_are_said_whenever_their_number_has_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, said = finished(tmp_path, monkeypatch, 0), list[str]()

    def run_ranks(commands: object, folder: RunFolder, tick: Callable[[], None], *rest: object) -> None:
        for step, skipped in enumerate((0, 1, 2, 0, 1, 0, 1, 2), start=1):
            append(folder.metrics, {"step": step, "loss": 3.0, **({"skipped": skipped} if skipped else {})})
            tick()

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, say=said.append)
    found = [line.partition(", because loss or gradients are not finite; the last is ") for line in said]
    assert [(what, where.partition(":")[0]) for what, because, where in found if because] == [
        ("warning: 1 step was skipped", "step 2"),
        ("warning: 2 steps were skipped", "step 3"),
        ("warning: 4 steps were skipped", "step 7"),
    ]


def test_a_host_with_too_little_memory_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, said, shown = finished(tmp_path, monkeypatch, 0), list[str](), list[Any]()

    def run_ranks(commands: object, folder: RunFolder, tick: Callable[[], None], *rest: object) -> None:
        for step, short in enumerate([None, 3 * 2**30, 3 * 2**30], start=1):
            append(folder.metrics, {"step": step, "loss": 3.0, "host_short": short, "copy_short": short})
            tick()

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, say=said.append, on_step=shown.append)
    (reported,) = [line for line in said if "for offload" in line]
    assert reported.startswith("warning: a host lacked 3.0 GiB that a rank needs for offload")
    (waiting,) = [line for line in said if "copy of a rank's states" in line]
    assert waiting.startswith("warning: a host lacked 3.0 GiB") and "training waits while checkpoints are" in waiting
    assert len(shown) == 3


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["data.long=step"],
            "a longer document forms a step alone; data.long=split distributes its pieces over steps",
        ),
        (
            ["data.long=split", "context=2K"],
            "a longer piece of context=2048 tokens forms a step alone; set a smaller context",
        ),
    ],
)
def test_a_step_beyond_batch_tokens_is_said_once(tmp_path: Path, overrides: list[str], expected: str) -> None:
    """Of more than 64 MiB, the lengths of documents are not known before."""
    folder, said, shown = RunFolder(tmp_path), list[str](), list[Any]()
    folder.metrics.touch()
    tail = MetricsTail(folder, config(tmp_path, *overrides), shown.append, said.append)
    for step, tokens in enumerate((1000, 1024, 1025, 9000), start=1):
        append(folder.metrics, {"step": step, "tokens": tokens})
        tail()
    assert said == [f"warning: step 3 has 1,025 tokens, more than batch_tokens=1024: {expected}"]
    assert len(shown) == 4


@pytest.mark.parametrize(("balances", "low"), [([0.3] * 12, 1), ([0.3] * 9, 0), ([0.3] * 5 + [0.8] * 5 + [0.1] * 9, 0)])
def test_a_low_balance_of_the_first_ten_steps_is_said_once(tmp_path: Path, balances: list[float], low: int) -> None:
    folder, said = RunFolder(tmp_path), list[str]()
    folder.metrics.touch()
    tail = MetricsTail(folder, config(tmp_path), lambda line: None, said.append)
    for step, balance in enumerate(balances, start=1):
        append(folder.metrics, {"step": step, "balance": balance})
        tail()
    assert len(said) == low and all(line.startswith("warning: batch_tokens: ") and "30%" in line for line in said)


@pytest.mark.parametrize(("names", "sets"), [([], "set is"), (["web", "code"], "sets of web, code are")])
def test_validation_sets_that_are_empty_are_said_once(tmp_path: Path, names: list[str], sets: str) -> None:
    folder, said = RunFolder(tmp_path), list[str]()
    folder.metrics.touch()
    places = [f"data.sources.{name}.path={tmp_path}" for name in names]
    mix = [f"data.mix={{{', '.join(f'{name}: 1' for name in names)}}}"] if names else []
    tail = MetricsTail(folder, config(tmp_path, *places, *mix), lambda line: None, said.append)
    for step in (1, 2):
        append(folder.metrics, {"step": step, "unvalidated": names or ["data"]})
        tail()
    hint = "set a larger data.validation_share or data.validation_tokens"
    assert said == [f"warning: the validation {sets} empty; {hint}"]


def test_damaged_metrics_are_reported_once_while_ranks_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, said = config(tmp_path), list[str]()

    def run_ranks(commands: object, folder: RunFolder, tail: MetricsTail, *rest: object) -> None:
        for content in (b"\0\0\n", b"", b'{"step": 2, "loss": 1.0}\n'):
            with folder.metrics.open("ab") as file:
                file.write(content)
            tail()

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, say=said.append)
    assert len([line for line in said if str(tmp_path / "run" / "metrics.jsonl") in line and "damaged" in line]) == 1
