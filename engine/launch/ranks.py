"""Runs the ranks: starts them, forwards requests to stop, waits, and finds out which rank failed first and why."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import ParamSpec

from engine.cluster.hosts import is_local
from engine.errors import BytescaleError, ExitCode
from engine.launch.commands import RankCommand
from engine.run.checkpoints import newest_first
from engine.run.folder import RunFolder

P = ParamSpec("P")

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.05
_GRACE_S = 5.0  # after a failure, time for the other ranks to report their errors
_LAST_BYTES = 4096  # of a log, in which its last line is looked for
_SSH_FAILED = 255
_NOT_STARTED = (1, 2, 126, 127)  # of a shell or Python: no such folder, program or module


class RankError(BytescaleError):
    """A rank failed. `code` is the rank's exit code, 128 + N if signal N killed it, or BUG if it gave no reason."""

    traced = True

    def __init__(self, message: str, code: int, folder: RunFolder, rank: int, hint: str | None) -> None:
        super().__init__(message, key=str(folder.log(rank)), hint=hint or f"the logs of all ranks are in {folder.logs}")
        self.code = code  # type: ignore[assignment]  # the code of a signal is not in the table


class PreemptedError(BytescaleError):
    """The run was asked to stop. It has a checkpoint to resume from, unless this is an InterruptedRunError."""

    code = ExitCode.PREEMPTED


class InterruptedRunError(PreemptedError):
    """The run was stopped before it had saved a checkpoint."""

    code = ExitCode.INTERRUPTED


@dataclass
class RankProcess:
    """A started rank. It has a session of its own, so that Ctrl-C reaches it only through the launcher."""

    rank: int
    host: str
    process: subprocess.Popen[bytes]
    logged: int  # bytes in its log before it started

    def ask_to_stop(self) -> None:
        """Write a byte to the rank's standard input. A signal would end ssh before the remote rank has saved."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has already ended
            os.write(self.process.stdin.fileno(), b"\n")

    def kill(self) -> None:
        """Kill the rank and every process that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class End:
    """The exit code of a rank that ended by itself, and the time.time() at which the launcher noticed."""

    code: int
    seen: float


def run_ranks(
    commands: Sequence[RankCommand], folder: RunFolder, tick: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Start the ranks and wait until all have ended; call `tick` every 0.05 s while waiting.

    Raises RankError with the cause of the first failure, or PreemptedError if the run was asked to stop. When this
    returns or raises, all ranks have ended. If `tick` or `say` cannot write to a closed terminal, the run continues.
    """
    for command in commands:
        folder.error(command.rank).unlink(missing_ok=True)
    ranks: list[RankProcess] = []
    before = _size(folder.metrics)
    try:
        for command in commands:
            logged = _size(folder.log(command.rank))
            with folder.log(command.rank).open("ab") as log:
                process = subprocess.Popen(
                    command.arguments,
                    env={**os.environ, **command.environment},
                    stdin=subprocess.PIPE,  # a byte asks the rank to stop; the pipe closes when this process ends
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            ranks.append(RankProcess(command.rank, command.host, process, logged))
        with _stop_requests(ranks) as requests:
            ends = _wait(ranks, requests, unfailing(tick), unfailing(say))
    finally:
        for rank in ranks:
            rank.kill()
            rank.process.communicate()  # waits, and closes the pipe
    trained = _size(folder.metrics) > before
    _raise_first_failure(ends, {rank.rank: rank for rank in ranks}, folder, trained, requests=len(requests))


def _wait(
    ranks: Sequence[RankProcess], requests: Sequence[int], tick: Callable[[], None], say: Callable[[str], None]
) -> dict[int, End]:
    """Wait for all ranks; after a failure, only for the grace period. Returns the end of each rank.

    Ranks that still run after the grace period are left out.
    """
    ended: dict[int, End] = {}
    deadline, announced = math.inf, False
    while True:
        for rank in ranks:
            code = rank.process.poll()
            if code is not None:
                ended.setdefault(rank.rank, End(code, time.time()))
        if any(end.code not in (0, ExitCode.PREEMPTED) for end in ended.values()):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if requests and not announced:
            announced = True
            say("stopping after this step, with a checkpoint; press Ctrl-C again to stop immediately")
        tick()
        if len(ended) == len(ranks) or time.monotonic() > deadline:
            return ended
        time.sleep(_POLL_S)


@contextmanager
def _stop_requests(ranks: Sequence[RankProcess]) -> Iterator[list[int]]:
    """Handle signals and yield the list of those received: the first asks the ranks to save and end, the second kills.

    The handler prints nothing: it may interrupt another print, and printing may fail.
    """
    requests: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.kill() if requests else rank.ask_to_stop()
        requests.append(number)

    # nohup starts a process with SIGHUP ignored; keep it ignored.
    numbers = [n for n in _STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def unfailing(talk: Callable[P, None]) -> Callable[P, None]:
    """Wrap a function that writes to a terminal or a pipe: ignore its OSErrors, so that the run continues."""

    def safely(*args: P.args, **kwargs: P.kwargs) -> None:
        with suppress(OSError):
            talk(*args, **kwargs)

    return safely


def _raise_first_failure(
    ends: dict[int, End], ranks: dict[int, RankProcess], folder: RunFolder, trained: bool, requests: int
) -> None:
    """Raise RankError for the rank that failed first, or PreemptedError if ranks only stopped on request.

    Does nothing if no rank failed. `trained` says whether a step was finished. `requests` is the number of requests to
    stop.
    """
    failed = {rank: end for rank, end in ends.items() if end.code != 0}
    causes = {rank: json.loads(folder.error(rank).read_text()) for rank in failed if folder.error(rank).exists()}
    # Exit codes of ranks that were asked to stop. A scheduler may signal the ranks too, even before they handle
    # signals; after a second request all are killed.
    stopped: tuple[int, ...] = (ExitCode.PREEMPTED, -signal.SIGTERM, -signal.SIGKILL)[: 1 + requests]
    if requests > 1:
        # An unexpected error then only means that the rank noticed the others being killed.
        causes = {rank: cause for rank, cause in causes.items() if cause["code"] != ExitCode.BUG}
        stopped += (ExitCode.BUG,)
    blamed = {rank: end for rank, end in failed.items() if rank in causes or end.code not in stopped}
    if not blamed:
        if failed:
            saved = all(end.code == ExitCode.PREEMPTED for end in failed.values()) or newest_first(folder.checkpoints)
            stop = PreemptedError if saved else InterruptedRunError
            raise stop("stopped on request", key=str(folder.root), hint=_how_to_resume(folder))
        return

    def order(rank: int) -> tuple[bool, float]:
        """Sort key: the first failure is smallest. Unexpected errors come last: another one may have caused them.

        A failure with a cause has the time at which the cause was written, because other ranks may fail because of it
        before its own rank has ended.
        """
        cause = causes.get(rank)
        if cause is None:
            return False, blamed[rank].seen
        return cause["code"] == ExitCode.BUG, min(blamed[rank].seen, float(cause["time"]))

    rank = min(blamed, key=order)
    if rank in causes:
        cause = causes[rank]
        place = f" ({cause['key']})" if cause["key"] else ""
        raise RankError(f"rank {rank} failed: {cause['message']}{place}", cause["code"], folder, rank, cause["hint"])
    code = blamed[rank].code
    if code < 0:  # a signal killed it, so it wrote no cause
        message = f"rank {rank} was killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            message += " (Linux does this when a host runs out of memory)"
        raise RankError(message, 128 - code, folder, rank, _how_to_resume(folder))
    if code == ExitCode.STORAGE:  # the rank could not write the cause either
        message = f"rank {rank} could not write its files: the disk is full, or storage failed"
        raise RankError(message, code, folder, rank, f"free some space; then {_how_to_resume(folder)}")
    raise _unexplained(ranks[rank], code, folder, started=trained or bool(causes))


def _unexplained(rank: RankProcess, code: int, folder: RunFolder, started: bool) -> RankError:
    """Build the error of a rank that exited without a cause: its message ends with the last line of the rank's log.

    On another host that is often ssh's or the shell's. Then, unless ranks had `started`, a check of the hosts failed.
    """
    here = is_local(rank.host)
    said, place = _last_line(folder.log(rank.rank), rank.logged), "" if here else f" on {rank.host}"
    message = f"rank {rank.rank}{place} exited with code {code}" + (
        f": {said}" if said else " without an error message"
    )
    hint, kind = None, ExitCode.BUG
    if not here and code in (_SSH_FAILED, *_NOT_STARTED):
        kind = ExitCode.BUG if started else ExitCode.PREFLIGHT
        hint = f"every host needs this folder, the run folder and {sys.executable} under the same paths"
        if code == _SSH_FAILED:
            hint = f"check `ssh {rank.host}`, which must work without a password"
    return RankError(message, kind, folder, rank.rank, hint)


def _last_line(log: Path, start: int) -> str:
    """Return the last line of a log that is not empty, after byte `start`; an empty text if there is none."""
    with log.open("rb") as file:
        file.seek(max(start, _size(log) - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _how_to_resume(folder: RunFolder) -> str:
    if newest_first(folder.checkpoints):
        return "run the same command to resume from the last checkpoint"
    return "run the same command to start again; no checkpoint had been saved yet"
