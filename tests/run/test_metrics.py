from __future__ import annotations

from pathlib import Path

import pytest

from engine.run.metrics import append, cut_back, read_from, read_metrics


def test_floats_are_read_back_exactly_and_a_cut_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = [1 / 3, 0.1 + 0.2, 5e-324]
    for step, loss in enumerate(losses, 1):
        append(path, {"step": step, "loss": loss})
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["loss"] for line in read_metrics(path)] == losses


DAMAGED = [b"\0" * 40, b"\xff\xfe", b'{"step": 2, "lo', b"[2]", b'{"loss": 2.0}', b'{"step": null}', b""]
DAMAGED += [
    b'{"step": 2, "loss": "low"}',
    b'{"step": 2, "tokens": NaN}',
    b'{"step": 2, "tokens": [1]}',
    b'{"step": true}',
]
DAMAGED += [b'{"step": true}', b"[" * 100_000, b'{"step": ' + b"9" * 400 + b"}", b'{"step": ' + b"9" * 5000 + b"}"]


@pytest.mark.parametrize("text", DAMAGED)
@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_damaged_line_is_reported_and_skipped_anywhere(tmp_path: Path, text: bytes, end: bytes) -> None:
    """A power loss leaves zeros for data that was not yet on disk, while the checkpoint may be intact."""
    path, said = tmp_path / "metrics.jsonl", list[str]()
    whole = b'{"step": 1}\n'
    path.write_bytes(whole + text + b"\n" + whole.replace(b"1", b"3"))
    assert read_from(path, 0)[0] == [{"step": 1}, {"step": 3}]
    cut_back(path, 3, said.append)
    assert read_metrics(path, said.append) == [{"step": 1}, {"step": 3}]
    path.write_bytes(whole + text + end)
    assert read_metrics(path, said.append) == [{"step": 1}]
    named = [line.split(": ")[0] for line in said]
    assert named == [f"{path}:2"] * (2 if text or end else 1)


def test_a_complete_line_without_a_newline_is_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_cut_back_keeps_the_steps_up_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        append(path, {"step": step})
    cut_back(path, 2)
    append(path, {"step": 3, "again": True})
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    cut_back(path, 0)
    assert read_metrics(path) == []


def test_new_lines_are_read_once_and_only_when_complete(tmp_path: Path) -> None:
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


def test_values_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        append(tmp_path / "metrics.jsonl", {"step": 1, "loss": float("nan")})


def test_damage_is_reported_in_one_message_with_the_number_of_lines(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", list[str]()
    path.write_bytes(b'{"step": 1}\n\0\n\0\n{"step": 4}\n\0\n{"st')
    read_metrics(path, said.append)
    read_metrics(path, said.append, growing=True)
    lines, offset = read_from(path, 0, said.append)
    assert lines == [{"step": 1}, {"step": 4}]
    assert read_from(path, offset, said.append) == ([], offset)
    assert len(said) == 3 and [line.startswith(f"{path}:2: ") for line in said] == [True, True, False]
    assert ["3 lines" in said[0], "2 lines" in said[1], "3 lines" in said[2]] == [True] * 3
