from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bytescale_cli import output
from engine.errors import ExitCode, StorageError


def test_talk_goes_to_stderr_and_data_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    output.say("working")
    output.emit({"a": 1}, "text\n", as_json=False)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("text\n", "working\n")


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit({"a": 1}, "text", as_json=True)
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "ok": True, "a": 1}


def test_json_has_no_nan() -> None:
    """NaN is no JSON: readers in other languages stop at it."""
    with pytest.raises(ValueError, match="JSON"):
        output.emit({"a": float("nan")}, "", as_json=True)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("recipes list | true", 0),
        ("recipes list --json | true", 0),
        ("recipes show none --json | true", 2),
        ("recipes show none 2>&1 | true", 2),
        ("recipes list --json >/dev/full", 74),
        ("recipes list >&-", 0),
        ("recipes show none 2>&-", 2),
    ],
)
def test_who_reads_a_command_does_not_change_its_code(line: str, code: int) -> None:
    """A training under `| head` has trained; only what could not be stored is a failure."""
    words = f"{sys.executable} -m bytescale_cli {line}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_a_plain_table_is_aligned() -> None:
    assert output.table(["n", "name"], [["1", "a"], ["10", "bc"]]) == "n   name\n1   a\n10  bc"
    assert output.table(["n", "value"], [["1", "2.5"]], right=True) == "n  value\n1    2.5"


def test_questions_have_their_columns_and_those_that_no_row_has_are_left_out() -> None:
    rows = [{"planner": "static", "step_s": "2.5"}, {"planner": "naive", "step_s": "12.5"}]
    text = output.sections(["planner"], {"How fast?": ["step_s", "gain"], "How large?": ["bytes"]}, rows)
    assert text == "How fast?\nplanner  step_s\nstatic      2.5\nnaive      12.5"


def test_a_cell_cannot_change_what_the_terminal_shows() -> None:
    assert output.table(["name"], [["[bold]\x1b[31mx"]]) == "name\n[bold]?[31mx"


def test_a_page_is_written_and_said_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output.write_page(tmp_path / "a.html", "text µ")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == "text µ"
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"charts: {tmp_path / 'a.html'}\n")


def test_a_full_disk_leaves_the_old_page_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a.html").write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"a\.html cannot be written: No space left") as failed:
        output.write_page(tmp_path / "a.html", "new")
    assert (failed.value.code, failed.value.problems[0].key) == (ExitCode.STORAGE, "--plot")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
    assert (tmp_path / "a.html").read_text() == "old"
