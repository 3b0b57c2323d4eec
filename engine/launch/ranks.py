"""Running ranks: starts them, passes signals on, waits, and finds out which failed first and why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from engine.errors import BytescaleError, ExitCode
from engine.launch.commands import RankCommand
from engine.trainer.checkpoint import newest_first
from engine.trainer.folder import RunFolder

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
        """Tell the rank alone: what it started must go on until the rank has finished its step."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the rank and all that it started, now."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def run_ranks(
    commands: Sequence[RankCommand], folder: RunFolder, tick: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Start the ranks and wait until all have ended; `tick` is called while waiting.

    Raises RankError with the first failing rank's cause, or PreemptedError. No rank outlives this call.
    """
    for command in commands:
        folder.error(command.rank).unlink(missing_ok=True)
    ranks: list[RankProcess] = []
    try:
        for command in commands:
            ranks.append(_start(command, folder))
        with _signals_passed_on(ranks, say) as asked:
            codes = _wait(ranks, tick)
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
            stdin=subprocess.PIPE,  # never written to: it closes when this process ends, and the rank ends with it
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return RankProcess(command.rank, process)


def _wait(ranks: Sequence[RankProcess], tick: Callable[[], None]) -> dict[int, int]:
    """Return the exit codes of the ranks that ended by themselves: all, or those within a grace after a failure."""
    failed_at: float | None = None
    while True:
        codes = {rank.rank: rank.process.poll() for rank in ranks}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        if failed_at is None and any(code not in (0, ExitCode.PREEMPTED) for code in ended.values()):
            failed_at = time.monotonic()
        if len(ended) == len(ranks) or (failed_at is not None and time.monotonic() - failed_at > _GRACE_S):
            tick()
            return ended
        tick()
        time.sleep(_POLL_S)


@contextmanager
def _signals_passed_on(ranks: Sequence[RankProcess], say: Callable[[str], None]) -> Iterator[list[int]]:
    """Let the first SIGINT or SIGTERM ask the ranks to save and stop, and the second one kill them; yield both."""
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            rank.kill() if asked else rank.ask_to_stop()
        if not asked:
            say("stopping when this step is done and saved; once more stops at once")
        asked.append(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _judge(codes: dict[int, int], folder: RunFolder, asked: int) -> None:
    failed = {rank: code for rank, code in codes.items() if code != 0}
    if not failed:
        return
    # A rank that was not listening yet ends by the signal itself; asked twice, all are killed.
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
