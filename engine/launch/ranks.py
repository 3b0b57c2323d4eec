"""Running ranks: starts them, passes signals on, waits, and finds out which failed first and why."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, ParamSpec

from engine.errors import BytescaleError, ExitCode
from engine.launch.commands import RankCommand
from engine.trainer.checkpoint import newest_first
from engine.trainer.folder import RunFolder

P = ParamSpec("P")

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one but under nohup, which has it ignored
_POLL_S = 0.05
_GRACE_S = 5.0  # how long the others may take to say what they saw when one has failed


class RankError(BytescaleError):
    """A rank ended with an error; `code` is that rank's own exit code, or 128 + N if signal N killed it."""

    traced = True

    def __init__(self, message: str, code: int, folder: RunFolder, rank: int, hint: str | None) -> None:
        super().__init__(message, key=str(folder.log(rank)), hint=hint or f"the other ranks' logs are in {folder.logs}")
        self.code = code  # type: ignore[assignment]  # a signal's code is outside the table


class PreemptedError(BytescaleError):
    """The run was asked to stop, and there is a checkpoint to go on from."""

    code = ExitCode.PREEMPTED


class InterruptedRunError(PreemptedError):
    """The run was stopped before it had saved anything."""

    code = ExitCode.INTERRUPTED


@dataclass
class RankProcess:
    """A started rank. It lives in a session of its own, so that a signal reaches it only through the launcher."""

    rank: int
    process: subprocess.Popen[bytes]

    def ask_to_stop(self) -> None:
        """Write to the rank's standard input. A signal would end an ssh before the rank behind it has saved."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended already
            os.write(self.process.stdin.fileno(), b"\n")

    def kill(self) -> None:
        """End the rank and all that it started, now."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class End:
    """How a rank ended by itself: its exit code, and when that was seen, as time.time() counts."""

    code: int
    seen: float


def run_ranks(
    commands: Sequence[RankCommand], folder: RunFolder, tick: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Start the ranks and wait until all have ended; `tick` is called while waiting.

    Raises RankError with the first failing rank's cause, or PreemptedError. No rank outlives this call, and the run
    outlives its terminal: a `tick` or `say` that fails to write is passed over.
    """
    for command in commands:
        folder.error(command.rank).unlink(missing_ok=True)
    ranks: list[RankProcess] = []
    try:
        for command in commands:
            ranks.append(_start(command, folder))
        with _signals_passed_on(ranks) as asked:
            ends = _wait(ranks, asked, unfailing(tick), unfailing(say))
    finally:
        for rank in ranks:
            rank.kill()
            rank.process.communicate()  # waits, and closes the pipe
    _judge(ends, folder, asked=len(asked))


def _start(command: RankCommand, folder: RunFolder) -> RankProcess:
    with folder.log(command.rank).open("ab") as log:
        process = subprocess.Popen(
            command.arguments,
            env={**os.environ, **command.environment},
            stdin=subprocess.PIPE,  # a byte asks the rank to stop; it closes when this process ends, however
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return RankProcess(command.rank, process)


def _wait(
    ranks: Sequence[RankProcess], asked: Sequence[int], tick: Callable[[], None], say: Callable[[str], None]
) -> dict[int, End]:
    """Return the ends of the ranks that ended by themselves: all, or those within a grace after a failure."""
    ended: dict[int, End] = {}
    deadline, told = math.inf, False
    while True:
        for rank in ranks:
            code = rank.process.poll()
            if code is not None:
                ended.setdefault(rank.rank, End(code, time.time()))
        if any(end.code not in (0, ExitCode.PREEMPTED) for end in ended.values()):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if asked and not told:
            told = True
            say("stopping when this step is done and saved; once more stops at once")
        tick()
        if len(ended) == len(ranks) or time.monotonic() > deadline:
            return ended
        time.sleep(_POLL_S)


@contextmanager
def _signals_passed_on(ranks: Sequence[RankProcess]) -> Iterator[list[int]]:
    """Let the first signal to stop ask the ranks to save and end, and the second one kill them; yield both.

    The handler says nothing: it may run in the middle of a print, and printing may fail.
    """
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.kill() if asked else rank.ask_to_stop()
        asked.append(number)

    heard = [number for number in _STOPS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in heard}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def unfailing(talk: Callable[P, None]) -> Callable[P, None]:
    """Return `talk` for a run that outlives its terminal, and whoever reads its pipe."""

    def safely(*args: P.args, **kwargs: P.kwargs) -> None:
        with suppress(OSError):
            talk(*args, **kwargs)

    return safely


def _judge(ends: dict[int, End], folder: RunFolder, asked: int) -> None:
    failed = {rank: end for rank, end in ends.items() if end.code != 0}
    # A scheduler may send its signal to the ranks too, also before they listen; asked twice, all are killed.
    stopped: tuple[int, ...] = (ExitCode.PREEMPTED, -signal.SIGTERM, -signal.SIGKILL)[: 1 + asked]
    causes = {rank: json.loads(folder.error(rank).read_text()) for rank in failed if folder.error(rank).exists()}
    if asked > 1:  # what failed by no known cause has seen the others being killed
        causes = {rank: cause for rank, cause in causes.items() if cause["code"] != ExitCode.BUG}
        stopped += (ExitCode.BUG,)
    blamed = {rank: end for rank, end in failed.items() if rank in causes or end.code not in stopped}
    if failed and not blamed:
        saved = all(end.code == ExitCode.PREEMPTED for end in failed.values()) or newest_first(folder.checkpoints)
        stop = PreemptedError if saved else InterruptedRunError
        raise stop("stopped as asked", key=str(folder.root), hint=_way_on(folder))
    if not blamed:
        return
    rank = min(blamed, key=lambda rank: _blame(blamed[rank], causes.get(rank)))
    if rank not in causes:
        raise _died(rank, blamed[rank].code, folder)
    cause = causes[rank]
    place = f" ({cause['key']})" if cause["key"] else ""
    raise RankError(f"rank {rank} failed: {cause['message']}{place}", cause["code"], folder, rank, cause["hint"])


def _blame(end: End, cause: dict[str, Any] | None) -> tuple[bool, float]:
    """Return a key by which the first failure is the least.

    A rank that fails by an error of no known type may only have seen another one go, so it comes last. A cause counts
    from when it was written: until its rank has ended, the others may have died of it.
    """
    if cause is None:
        return False, end.seen
    return cause["code"] == ExitCode.BUG, min(end.seen, float(cause["time"]))


def _died(rank: int, code: int, folder: RunFolder) -> RankError:
    if code < 0:
        name = signal.Signals(-code).name
        return RankError(f"rank {rank} was killed by {name}", 128 - code, folder, rank, _way_on(folder))
    if code == ExitCode.STORAGE:
        return RankError(f"rank {rank}: the disk is full, or writing failed", code, folder, rank, _way_on(folder))
    return RankError(f"rank {rank} ended with exit code {code} and gave no reason", ExitCode.BUG, folder, rank, None)


def _way_on(folder: RunFolder) -> str:
    if newest_first(folder.checkpoints):
        return "the same command goes on from the last checkpoint"
    return "the same command starts again: there is no checkpoint yet"
