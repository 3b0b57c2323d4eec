from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bytescale_cli import output
from bytescale_cli.progress import progress
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
    assert code != 74 or done.stderr.startswith("error: stdout: ")


HOSTILE = "a\x1b]0;title\x07\x1b[2J\x1b[8mb\r\x9b1mc\x7f\u202ed\u2028e\tf\n"


def test_texts_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents, names of files and logs may contain escapes that clear the screen, or turn text around."""
    output.say(HOSTILE)
    output.show(HOSTILE)
    output.emit({}, HOSTILE, as_json=False)
    shown = "a\\x1b]0;title\\x07\\x1b[2J\\x1b[8mb\\r\\x9b1mc\\x7f\\u202ed\\u2028e\tf\n"
    captured = capsys.readouterr()
    assert captured.err.startswith(shown) and captured.out.startswith(shown + "\n" + shown)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    with progress(10) as (say, _):
        say(HOSTILE)
    assert "\x1b]0" not in capsys.readouterr().err


def test_styles_of_ours_stay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output.say("error: a")
    assert capsys.readouterr().err == "\x1b[31merror:\x1b[0m a\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_of_a_stream_takes_any_text(encoding: str, tmp_path: Path) -> None:
    """Also names of files that are not UTF-8, which Python reads as surrogates."""
    folder = os.fsencode(tmp_path / "\u0142\u00b5") + b"\xff"
    Path(os.fsdecode(folder)).mkdir()
    words = [sys.executable, "-m", "bytescale_cli", "runs", "list", folder]
    done = subprocess.run(words, capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding})
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("/\u0142\u00b5".encode(encoding, "backslashreplace") + b"\\udcff\n")


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
