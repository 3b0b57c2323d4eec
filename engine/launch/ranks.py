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
from typing import ParamSpec

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
    """The run was asked to stop; its ranks saved a checkpoint first, unless they were still starting."""

    code = ExitCode.PREEMPTED


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
            codes = _wait(ranks, asked, unfailing(tick), unfailing(say))
    finally:
        for rank in ranks:
            rank.kill()
            rank.process.communicate()  # waits, and closes the pipe
    _judge(codes, folder, asked=len(asked))


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
) -> dict[int, int]:
    """Return the exit codes of the ranks that ended by themselves: all, or those within a grace after a failure."""
    deadline, told = math.inf, False
    while True:
        codes = {rank.rank: rank.process.poll() for rank in ranks}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        if any(code not in (0, ExitCode.PREEMPTED) for code in ended.values()):
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


def _judge(codes: dict[int, int], folder: RunFolder, asked: int) -> None:
    failed = {rank: code for rank, code in codes.items() if code != 0}
    if not failed:
        return
    # A scheduler may send its signal to the ranks too, also before they listen; asked twice, all are killed.
    stopped = (ExitCode.PREEMPTED, -signal.SIGTERM, -signal.SIGKILL)[: 1 + asked]
    if all(code in stopped for code in failed.values()):
        raise PreemptedError("stopped as asked", key=str(folder.root), hint=_way_on(folder))
    causes = {rank: json.loads(folder.error(rank).read_text()) for rank in failed if folder.error(rank).exists()}
    for rank, code in failed.items():  # whoever died without a word died first: the others report that it is gone
        if rank not in causes and code != ExitCode.PREEMPTED:
            raise _died(rank, code, folder)
    rank = min(causes, key=lambda r: float(causes[r]["time"]))
    cause = causes[rank]
    place = f" ({cause['key']})" if cause["key"] else ""
    raise RankError(f"rank {rank} failed: {cause['message']}{place}", cause["code"], folder, rank, cause["hint"])


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
