from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import DataError, ExitCode
from engine.trainer.rank import explain

ERRORS = [
    (DataError("gone", key="a.txt"), ExitCode.DATA, "gone"),
    (OSError(errno.ENOSPC, "No space left on device", "x"), ExitCode.STORAGE, "No space left"),
    (PermissionError(errno.EACCES, "Permission denied", "x"), ExitCode.STORAGE, "Permission denied"),
    (RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/3"), ExitCode.STORAGE, "checkpoint"),
    (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos"), ExitCode.STORAGE, "checkpoint"),
    (MemoryError(), ExitCode.MEMORY, "out of memory"),
    (torch.OutOfMemoryError("CUDA out of memory"), ExitCode.MEMORY, "out of memory"),
    (ValueError("odd\nmore"), ExitCode.BUG, "ValueError: odd"),
]


def fail(folder: Path, stderr: int) -> subprocess.Popen[str]:
    """Start a rank that fails, with its standard input open. In a process of its own, because it handles signals."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom engine.run.folder import RunFolder\n"
        "from engine.trainer.rank import run_rank\n"
        f"sys.exit(run_rank(RunFolder(Path({str(folder)!r})), lambda stop: 1 // 0))"
    )
    command, environment = [sys.executable, "-c", program], {**os.environ, "RANK": "0"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stderr, text=True, env=environment)


def test_a_rank_that_cannot_write_its_reason_prints_its_traceback(tmp_path: Path) -> None:
    with fail(tmp_path / "gone", subprocess.PIPE) as rank:
        assert rank.stderr is not None
        assert "ZeroDivisionError" in rank.stderr.read()
        assert rank.wait() == ExitCode.BUG


def test_a_rank_that_cannot_print_its_traceback_writes_its_reason(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    reader, writer = os.pipe()
    os.close(reader)
    with fail(tmp_path, writer) as rank:
        os.close(writer)
        rank.wait()
    cause = json.loads((tmp_path / "logs" / "rank-0.error.json").read_text())
    assert cause["message"].startswith("ZeroDivisionError")


@pytest.mark.parametrize(("error", "code", "message"), ERRORS)
def test_each_error_has_its_exit_code_and_one_sentence(error: BaseException, code: ExitCode, message: str) -> None:
    found, problem = explain(error)
    assert found == code
    assert message in problem.message
    assert "\n" not in problem.message
