from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch

from engine.control.link import RANK_LINK
from engine.control.protocol import Alive, At, Stop, line_of, message_of
from engine.errors import DataError, ExitCode
from engine.run.cause import Cause
from engine.run.folder import RunFolder
from engine.trainer.rank import explain, importing
from tests.launch.agents.nodes import real_rank

ERRORS = [
    (DataError("gone", key="a.txt"), ExitCode.DATA, "gone"),
    (OSError(errno.ENOSPC, "No space left on device", "x"), ExitCode.STORAGE, "No space left"),
    (PermissionError(errno.EACCES, "Permission denied", "x"), ExitCode.STORAGE, "Permission denied"),
    (RuntimeError("[enforce fail] PytorchStreamWriter failed writing file data/3"), ExitCode.STORAGE, "checkpoint"),
    (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos"), ExitCode.STORAGE, "checkpoint"),
    (MemoryError(), ExitCode.MEMORY, "out of memory"),
    (torch.OutOfMemoryError("CUDA out of memory"), ExitCode.MEMORY, "out of memory"),
    (RuntimeError("CUDA error: out of memory\nmore"), ExitCode.MEMORY, "out of memory: CUDA error"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), ExitCode.MEMORY, "the host's is full"),
    (RuntimeError("std::bad_alloc"), ExitCode.MEMORY, "the host's is full"),
    (RuntimeError("can't start new thread"), ExitCode.MEMORY, "thread"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), ExitCode.MEMORY, "the host's is full"),
    (
        RuntimeError(
            "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:5. This is typically caused by"
        ),
        ExitCode.HANG,
        "lost its connection to another rank: Connection closed by peer [::1]:5",
    ),
    (ConnectionError("the first has ended"), ExitCode.HANG, "its connection to another rank: the first has ended"),
    (torch.distributed.DistBackendError("NCCL error: remote\nmore"), ExitCode.HANG, "another rank: NCCL error: remote"),
    (ValueError("odd\nmore"), ExitCode.BUG, "ValueError: odd"),
    (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), ExitCode.BUG, "illegal memory"),
]
# Texts of cudaGetErrorString, NVML and NCCL.
BROKEN = [
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronous"),
    torch.AcceleratorError("CUDA error: uncorrectable NVLink error detected during the execution"),
    torch.AcceleratorError("CUDA error: unspecified launch failure"),
    torch.AcceleratorError("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"),
    RuntimeError("Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost"),
    torch.distributed.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:90, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function "
        "failed.\nLast error:\nCuda failure 719 'unspecified launch failure'"
    ),
]


# At each call and return while it handles a signal, another one arrives.
SIGNALLED = """
def work(stop, control):
    sys.setprofile(lambda *_: signal.raise_signal(signal.SIGUSR1))
    signal.raise_signal(signal.SIGTERM)
    sys.setprofile(None)
    return 75 if stop() else 1
"""
FAILS = "work = lambda stop, control: 1 // 0\n"


def alone(folder: Path, work: str, stderr: int) -> subprocess.Popen[str]:
    """Start a rank that does `work`, without an agent. In a process of its own, because it handles signals."""
    program = (
        "import signal, sys\nfrom pathlib import Path\nfrom engine.run.folder import RunFolder\n"
        f"from engine.trainer.rank import run_rank\n{work}"
        f"sys.exit(run_rank(RunFolder(Path({str(folder)!r})), work))"
    )
    command, environment = [sys.executable, "-c", program], {**os.environ, "RANK": "0"}
    return subprocess.Popen(command, stderr=stderr, text=True, env=environment)


@pytest.mark.long
def test_a_rank_does_not_import_mlflow_with_deepspeed(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom engine.run.folder import RunFolder\n"
        "from engine.trainer.rank import run_rank\n"
        "def work(stop, control):\n    import deepspeed.autotuning.autotuner\n    return 5\n"
        f"code = run_rank(RunFolder(Path({str(tmp_path)!r})), work)\n"
        "sys.exit(code + sum(name.startswith('mlflow.') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, "RANK": "0"})
    assert done.returncode == 5


def test_what_is_imported_is_left_out_of_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Mock()
    monkeypatch.setattr("engine.trainer.rank.gc", collector)
    with importing():
        assert collector.method_calls == [call.disable()]
    assert collector.method_calls == [call.disable(), call.freeze(), call.enable()]
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert collector.method_calls[-1] == call.enable()


def test_the_compiler_is_imported_with_the_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.trainer.rank.gc", Mock())
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    with pytest.raises(ImportError, match="_dynamo"), importing():
        pass


def test_a_rank_that_cannot_write_its_reason_prints_its_traceback(tmp_path: Path) -> None:
    with alone(tmp_path / "gone", FAILS, subprocess.PIPE) as rank:
        assert rank.stderr is not None
        assert "ZeroDivisionError" in rank.stderr.read()
        assert rank.wait() == ExitCode.BUG


def test_a_rank_that_cannot_print_its_traceback_writes_its_reason(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    reader, writer = os.pipe()
    os.close(reader)
    with alone(tmp_path, FAILS, writer) as rank:
        os.close(writer)
        rank.wait()
    cause = json.loads((tmp_path / "logs" / "rank-0.error.json").read_text())
    assert cause["message"].startswith("ZeroDivisionError")


def test_a_signal_while_another_one_is_handled_stops_the_rank_too(tmp_path: Path) -> None:
    """A scheduler may send both at once. A handler that takes a lock would wait for itself."""
    with alone(tmp_path, SIGNALLED, subprocess.DEVNULL) as rank:
        try:
            assert rank.wait(20) == ExitCode.PREEMPTED
        finally:
            rank.kill()


@pytest.fixture
def works(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """A rank that works until it is asked to stop, and the agent's end of its link."""
    (tmp_path / "logs").mkdir()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        environment = {**os.environ, "RANK": "0", RANK_LINK: str(theirs.fileno())}
        patient = "from engine.control import control\ncontrol.SILENCE_S = 1.5\n"
        command = [sys.executable, "-c", patient + real_rank(RunFolder(tmp_path))]
        with subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True
        ) as rank:
            theirs.close()
            assert message_of(ours.recv(4096)) == At(3, "forward", 1)
            yield rank, ours
            rank.kill()


def test_a_rank_that_its_agent_asks_to_stop_saves(
    tmp_path: Path, works: tuple[subprocess.Popen[str], socket.socket]
) -> None:
    rank, agent = works
    agent.sendall(line_of(Stop()))
    assert rank.wait(20) == ExitCode.PREEMPTED and (tmp_path / "saved").exists()


def test_a_rank_ends_at_once_when_its_agent_is_gone(
    tmp_path: Path, works: tuple[subprocess.Popen[str], socket.socket]
) -> None:
    """It would compute on a machine that a scheduler takes for free."""
    rank, agent = works
    agent.close()
    assert rank.wait(20) == ExitCode.BUG and not (tmp_path / "saved").exists()


def test_a_rank_ends_when_its_agent_is_stopped(
    tmp_path: Path, works: tuple[subprocess.Popen[str], socket.socket]
) -> None:
    """The launcher may not reach its host, and nobody else ends it. Without any sign of an agent, a rank waits."""
    rank, agent = works
    time.sleep(3)
    assert rank.poll() is None
    agent.sendall(line_of(Alive()))
    assert rank.wait(20) == ExitCode.HANG and not (tmp_path / "saved").exists()


def test_a_rank_writes_its_stacks_when_it_is_asked_to(works: tuple[subprocess.Popen[str], socket.socket]) -> None:
    rank, agent = works
    rank.send_signal(signal.SIGUSR2)
    assert rank.stderr is not None
    while not (line := rank.stderr.readline()).strip().endswith("in work"):
        assert line
    agent.sendall(line_of(Stop()))
    assert rank.wait(20) == ExitCode.PREEMPTED, "it goes on"


@pytest.mark.parametrize(("error", "code", "message"), ERRORS)
def test_each_error_has_its_exit_code_and_one_sentence(error: BaseException, code: ExitCode, message: str) -> None:
    cause = explain(error)
    assert cause.code == code
    assert message in cause.problem.message
    assert "\n" not in cause.problem.message


@pytest.mark.parametrize("error", BROKEN)
def test_a_gpu_that_fails_is_named_with_its_host(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "11")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-b")
    cause = explain(error)
    assert (cause.code, cause.hardware, cause.whole) == (ExitCode.PREFLIGHT, True, True)
    assert cause.problem.message.startswith("GPU 3 of gpu-b (rank 11) has failed: ") and cause.problem.hint
    assert cause == Cause.of_json(cause.to_json())
