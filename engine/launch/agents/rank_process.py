"""The process of a rank as its agent sees it: how it starts, what it reports, how it ends and what its log says."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from engine.cluster.numa import listed
from engine.control import protocol
from engine.control.link import NODE_SOCKETS, RANK_LINK, Link
from engine.control.processes import end_with_parent, is_stopped
from engine.control.protocol import Beat, Message, Place
from engine.control.reduction import UNORDERED
from engine.files import append
from engine.run.folder import RunFolder

_LAST_BYTES = 4096  # of a log, in which its last line is looked for
_ABORT_BYTES = 1 << 16  # in which the message of a C++ exception is looked for: its stack follows, twice
_STACKS_S = 2.0
_RECORDED = "2000"  # operations of NCCL that a rank remembers; PyTorch's default, which earlier versions do not have
_PIPE = "rank-"  # PyTorch adds the rank and `.pipe`


class Rank:
    """A started rank. It has a separate session, so that Ctrl-C reaches it only through the launcher."""

    def __init__(
        self,
        rank: int,
        program: Sequence[str],
        environment: dict[str, str],
        log: Path,
        since: float,
        node: Sequence[int],
        processors: set[int] | None = None,
    ) -> None:
        """Start the rank, which inherits its sockets to ranks of this `node`. It runs on these `processors` only.

        Raises OSError if its log cannot be written, or the program not started.
        """
        self.rank, self.log = rank, log
        self.logged = log.stat().st_size if log.exists() else 0
        self.at: Place | None = None
        self.at_since = since  # when it came there
        self.pace: float | None = None
        self.entered = 0
        self.planned_s: float | None = None
        self.step_since = since  # when it got the plan of its step
        self.measured: tuple[int, float, float] | None = None
        agent = os.getpid()

        def prepare() -> None:
            """Run in the new process, before the program of the rank."""
            # A rank listens to its agent and ends with it. This also ends one that is stopped when the agent dies.
            end_with_parent()
            if os.getppid() != agent:  # which was killed before that call
                os._exit(128 + signal.SIGKILL)
            if processors is not None:
                with suppress(OSError):  # they were just taken away from this job: the rank is only slower
                    os.sched_setaffinity(0, processors)
            # Slurm may send the signal to all processes of a job, and the launcher passes the request on.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

        with append(log) as file:
            if processors is not None:
                file.write(f"bound to processors {listed(processors)}, on the NUMA node of the GPU\n".encode())
                file.flush()
                self.logged = file.tell()
            ours, theirs = socket.socketpair()
            with ours, theirs:
                self.process = subprocess.Popen(
                    program,
                    env={**environment, RANK_LINK: str(theirs.fileno()), NODE_SOCKETS: " ".join(map(str, node))},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[theirs.fileno(), *node],
                    preexec_fn=prepare,  # system calls; they take no lock that another thread could hold
                )
                descriptor = ours.detach()
        self.link = Link(descriptor, descriptor)

    def note(self, message: Message, now: float) -> None:
        """Record what the rank reports about its step."""
        match message:
            case protocol.Pace(times):
                self.pace = times
            case protocol.Reduce(operation) if operation.kind not in UNORDERED:  # in which no step waits
                self.entered += 1
            case protocol.Planned(seconds):
                self.planned_s, self.step_since = seconds, now
            case protocol.At(step, phase, part):
                self.at, self.at_since = (step, phase, part), now
                # A step ends here: how long a validation or a checkpoint takes says nothing about other steps.
                if phase == "log" and self.planned_s is not None:
                    self.measured = step, self.planned_s, now - self.step_since

    def beat(self, now: float) -> Beat:
        age_s = now - self.at_since
        return Beat(
            self.at, age_s, is_stopped(self.process.pid), self.pace, self.entered, self.planned_s, self.measured
        )

    def kill(self) -> None:
        """Kill the rank and every process that it started."""
        if self.process.returncode is None:  # else its number may belong to another process by now
            os.killpg(self.process.pid, signal.SIGKILL)

    def has_ended_within(self, seconds: float) -> bool:
        """Wait up to this time for the process of the rank, and return whether it has ended."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ended(self) -> int | None:
        """Return the exit code of the rank if it has ended; then what it started is killed."""
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self.kill()
        return self.process.wait()


def recorded(environment: Mapping[str, str], folder: RunFolder, pipes: Path) -> dict[str, str]:
    """Return the variables with which PyTorch records the last operations of NCCL, for `write_records`.

    PyTorch makes a pipe for each rank in the folder `pipes`, which must be of this host. What the user has set, by its
    name of today or that of earlier versions, is left alone.
    """
    found = dict[str, str]()
    for names, value in (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), _RECORDED),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), str(folder.nccl_record(0))[:-1]),
        (("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",), str(pipes / _PIPE)),
    ):
        if not any(name in environment for name in names):
            found |= dict.fromkeys(names, value)
    return found


def write_records(ranks: Iterable[int], environment: Mapping[str, str]) -> None:
    """Let ranks write which operations of NCCL they have begun, within about a second; their threads of NCCL do it.

    `environment` is that of the ranks. A rank without a pipe uses no NCCL, or an earlier version of PyTorch.
    """
    prefix = environment.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    for rank in ranks if prefix else ():
        with suppress(OSError):
            pipe = os.open(f"{prefix}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                os.write(pipe, b"1")
            finally:
                os.close(pipe)


def write_stacks(ranks: dict[Path, int]) -> None:
    """Write what the threads of ranks, given as process numbers by log, are doing to their logs.

    With py-spy if there is one, which needs no help of the rank, else with faulthandler, which a rank has registered
    for SIGUSR2 (engine/trainer/rank.py). A rank that a signal has stopped cannot write them itself.
    """
    program, dumps = shutil.which("py-spy"), dict[int, subprocess.Popen[bytes]]()
    for log, pid in ranks.items():
        if program is not None:
            with append(log) as file:
                dump = [program, "dump", "--pid", str(pid)]
                dumps[pid] = subprocess.Popen(dump, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    last = time.monotonic() + _STACKS_S
    for pid in ranks.values():
        if pid in dumps:
            with suppress(subprocess.TimeoutExpired):
                dumps[pid].wait(max(0.0, last - time.monotonic()))
            dumps[pid].kill()
            if dumps[pid].wait() == 0:
                continue
        os.kill(pid, signal.SIGUSR2)  # also if py-spy lacks the permission


def last_line(log: Path, start: int) -> str:
    """Return the last line of a log that is not empty, after byte `start`; an empty text if there is none."""
    return next(filter(None, reversed(_end_of(log, start, _LAST_BYTES))), "")


def thrown(log: Path, start: int) -> str:
    """Return the message of the C++ exception that ended a process, from its log after byte `start`; empty if none."""
    lines = reversed(_end_of(log, start, _ABORT_BYTES))
    return next((line.removeprefix("what():").strip() for line in lines if line.startswith("what():")), "")


def _end_of(log: Path, start: int, size: int) -> list[str]:
    """Return the stripped lines in the last `size` bytes of a log, after byte `start`."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - size))
        return [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return []
