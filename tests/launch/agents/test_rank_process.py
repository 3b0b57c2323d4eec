"""What an agent does with the process of a rank besides starting it: it writes its stacks and reads its log."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.launch.agents.rank_process import last_line, write_stacks


def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Put a stand-in for py-spy first on PATH."""
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@"\nexit {code}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize("code", [0, 1])
def test_stacks_are_written_by_py_spy_if_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """It needs no help of a rank, but maybe a permission."""
    spy(tmp_path, monkeypatch, code)
    ready = "import faulthandler, signal; faulthandler.register(signal.SIGUSR2); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", ready], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        write_stacks({tmp_path / "log": rank.pid})
        time.sleep(0.5)
        _, stderr = rank.communicate("\n")
    assert (tmp_path / "log").read_text() == f"dump --pid {rank.pid}\n"
    assert ("<module>" in stderr) == (code != 0)


def test_the_last_line_of_a_log_is_of_this_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log, 0) == ""
    log.write_text("of an earlier run\n")
    assert last_line(log, log.stat().st_size) == ""
    with log.open("a") as file:
        file.write("x" * 10_000 + "\n  the end \n\n")
    assert last_line(log, 18) == "the end"
