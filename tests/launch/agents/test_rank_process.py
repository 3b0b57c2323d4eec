"""What an agent does with the process of a rank besides starting it: it writes its stacks and reads its log."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.launch.agents.rank_process import last_line, recorded, write_records, write_stacks
from engine.run.folder import RunFolder


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


def test_ranks_record_into_the_run_folder_unless_the_user_chose_another_place(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    found = recorded({}, folder, Path("/pipes"))
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        assert found[name] + "12" == str(folder.nccl_record(12)), "PyTorch adds the rank"
    assert found["TORCH_FR_BUFFER_SIZE"] == found["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert found["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == "/pipes/rank-"
    users = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_FR_DUMP_TEMP_FILE": "/mine"}
    assert set(recorded(users, folder, Path("/pipes"))) == {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE"}


def test_a_byte_to_the_pipe_of_each_rank_asks_for_its_record(tmp_path: Path) -> None:
    """PyTorch makes the pipes, and reads them each second."""
    os.mkfifo(tmp_path / "rank-3.pipe")
    reader = os.open(tmp_path / "rank-3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_records([3, 4], {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/rank-"})
    write_records([3], {})
    assert os.read(reader, 10) == b"1"
    os.close(reader)
    write_records([3], {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/rank-"})  # no one reads it: the rank has ended
