from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from engine.zero import host_adam


def program(folder: Path) -> Path:
    """Make a folder with a ninja in it."""
    folder.mkdir()
    (folder / "ninja").write_text("#!/bin/sh\n")
    (folder / "ninja").chmod(0o755)
    return folder


def ninja_of(path: Path, python: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Find the ninja that compiles with this PATH and the Python in this folder."""
    found: list[str | None] = []
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(sys, "executable", str(python / "python"))
    monkeypatch.setattr(host_adam.CPUAdamBuilder, "load", lambda self: found.append(shutil.which("ninja")))
    host_adam.compile_operator()
    assert os.environ["PATH"].endswith(str(path))
    return found[0]


def test_the_same_ninja_compiles_whatever_is_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions do not accept each other's output, so each would compile everything again."""
    beside, other, none = program(tmp_path / "beside"), program(tmp_path / "other"), tmp_path / "none"
    assert ninja_of(other, beside, monkeypatch) == str(beside / "ninja")
    assert ninja_of(none, beside, monkeypatch) == str(beside / "ninja")
    assert ninja_of(other, none, monkeypatch) == str(other / "ninja")


@pytest.mark.parametrize(("age_s", "there"), [(3600, False), (60, True)])
def test_a_lock_that_a_killed_compiler_left_is_removed(
    age_s: int, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would wait for it. A young one is that of another process, which compiles now."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - age_s,) * 2)
    monkeypatch.setattr(host_adam.CPUAdamBuilder, "load", lambda self: None)
    host_adam.compile_operator()
    assert lock.exists() == there


def test_on_a_gpu_machine_it_is_linked_without_cuda_libraries() -> None:
    """DeepSpeed before 0.19.8 linked it with -lcurand there, which only CUDA's development kit has."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    builder = CUDA_Accelerator().get_op_builder("CPUAdamBuilder")()
    assert not [flag for flag in (*builder.extra_ldflags(), *builder.libraries_args()) if "cu" in flag]
