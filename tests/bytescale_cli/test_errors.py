"""One place turns errors into lines and codes: at most three lines for a mistake, one line each for several."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import typer

from bytescale_cli.errors import report
from engine.errors import CheckpointError, ConfigError, DataError, PlanError, Problem


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(("error", "code"), [(ConfigError("no"), 2), (DataError("no"), 4), (CheckpointError("no"), 5)])
def test_each_error_has_its_code(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(error, as_json=False, debug=False) == code
    assert lines(capsys) == ["error: no"]


def test_cause_place_and_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    report(DataError("is not JSON", key="a.jsonl:7", hint="mend the line"), as_json=False, debug=False)
    assert lines(capsys) == ["error: a.jsonl:7: is not JSON", "hint: mend the line"]


def test_several_problems_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    error = ConfigError.of([Problem("bad", "a", "do b"), Problem("worse", "c")])
    assert report(error, as_json=True, debug=False) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["error: a: bad; do b", "error: c: worse"]
    payload = json.loads(captured.out)
    assert payload["error"] == {"code": 2, "message": "bad", "key": "a", "hint": "do b"}
    assert [one["key"] for one in payload["errors"]] == ["a", "c"]


def test_a_value_cannot_break_the_lines_or_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report(ConfigError("a\nb\x1b[31m"), as_json=False, debug=False)
    assert lines(capsys) == ["error: a b?[31m"]


@pytest.mark.parametrize("error", [ValueError("two\nlines"), PlanError(4, "two lines"), FileNotFoundError(2, "x")])
def test_a_bug_saves_its_traceback(
    error: Exception, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert report(error, as_json=False, debug=False) == 70
    (saved,) = tmp_path.iterdir()
    cause, hint = lines(capsys)
    assert type(error).__name__ in cause
    assert str(saved) in hint
    assert type(error).__name__ in saved.read_text(encoding="utf-8")


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ConfigError("no")
    except ConfigError as error:
        report(error, as_json=False, debug=True)
    assert "Traceback" in capsys.readouterr().err


def test_a_full_disk_is_a_storage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(OSError(errno.ENOSPC, "full", "runs/a"), as_json=False, debug=False) == 74
    assert lines(capsys)[0].startswith("error: runs/a: ")


def test_a_read_only_disk_has_space(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(OSError(errno.EROFS, "no", "runs/a"), as_json=False, debug=False) == 74
    assert lines(capsys) == ["error: runs/a: Read-only file system", "hint: choose a folder that you can write to"]


def test_a_path_without_permission_is_a_storage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(PermissionError(errno.EACCES, "no", "my run/a"), as_json=False, debug=False) == 74
    hint = "hint: `namei -l 'my run/a'` shows the permissions of this path and of its folders"
    assert lines(capsys) == ["error: my run/a: Permission denied", hint]


def test_a_process_without_permission_is_a_bug(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert report(PermissionError(errno.EPERM, "no"), as_json=False, debug=False) == 70


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_an_interrupt_is_no_bug(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(error, as_json=False, debug=False) == 130
    assert lines(capsys) == ["interrupted"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 7.45 GiB for an array"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("can't start new thread"),
        ImportError("libx.so: failed to map segment from shared object"),
    ],
    ids=str,
)
def test_running_out_of_memory_is_no_bug(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(error, as_json=False, debug=False) == 10
    first, second = lines(capsys)
    assert first.startswith("error: ") and "out of memory" in first
    assert second.startswith("hint: ")


@pytest.mark.parametrize("kind", [errno.ENAMETOOLONG, errno.ENOTDIR])
def test_a_path_that_names_no_file_is_no_bug(kind: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(OSError(kind, "odd", "x" * 3000), as_json=False, debug=False) == 2
    first, second = lines(capsys)
    assert first.startswith("error: xxx") and len(first) < 300
    assert second.startswith("hint: ")


def test_memory_names_the_module_in_which_it_ran_out(capsys: pytest.CaptureFixture[str]) -> None:
    from engine.readers import parse_json

    def fails(*_: object) -> None:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.readers._DECODER.decode", fails)
        with pytest.raises(MemoryError) as caught:
            parse_json(b"{}", "a")
    assert report(caught.value, as_json=False, debug=False) == 10
    assert "in engine/readers.py" in lines(capsys)[0]
