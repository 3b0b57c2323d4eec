from __future__ import annotations

import errno

import pytest
import torch

from engine.errors import DataError, ExitCode
from engine.trainer.rank import explain

ERRORS = [
    (DataError("gone", key="a.txt"), ExitCode.DATA, "gone"),
    (OSError(errno.ENOSPC, "No space left on device", "x"), ExitCode.STORAGE, "No space left"),
    (RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/3"), ExitCode.STORAGE, "checkpoint"),
    (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos"), ExitCode.STORAGE, "checkpoint"),
    (MemoryError(), ExitCode.MEMORY, "out of memory"),
    (torch.OutOfMemoryError("CUDA out of memory"), ExitCode.MEMORY, "out of memory"),
    (ValueError("odd\nmore"), ExitCode.BUG, "ValueError: odd"),
]


@pytest.mark.parametrize(("error", "code", "message"), ERRORS)
def test_each_error_has_its_exit_code_and_one_sentence(error: BaseException, code: ExitCode, message: str) -> None:
    found, problem = explain(error)
    assert found == code
    assert message in problem.message
    assert "\n" not in problem.message
