from __future__ import annotations

from pathlib import Path

import pytest

from engine.trainer.metrics import append, cut_back, read_from, read_metrics


def test_floats_come_back_to_the_last_bit_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = [1 / 3, 0.1 + 0.2, 5e-324]
    for step, loss in enumerate(losses, 1):
        append(path, {"step": step, "loss": loss})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["loss"] for line in read_metrics(path)] == losses


def test_cut_back_keeps_the_steps_up_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append(path, {"step": step})
    cut_back(path, 2)
    append(path, {"step": 3, "again": True})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    cut_back(path, 0)
    assert read_metrics(path) == []


def test_what_is_new_is_read_once_and_a_line_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, {"step": 1})
    lines, offset = read_from(path, 0)
    assert lines == [{"step": 1}]
    with path.open("a") as file:
        file.write('{"step": 2}\n{"st')
    lines, offset = read_from(path, offset)
    assert lines == [{"step": 2}]
    with path.open("a") as file:
        file.write('ep": 3}\n')
    assert read_from(path, offset) == ([{"step": 3}], path.stat().st_size)


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        append(tmp_path / "metrics.jsonl", {"step": 1, "loss": float("nan")})
