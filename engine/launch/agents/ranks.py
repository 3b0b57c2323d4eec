"""Runs the ranks through the agents of their nodes: starts them, passes on requests to stop, and explains failures.

Ranks start when all agents have answered, so a host that cannot be reached, or has no Python, stops a run before it
begins.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import ParamSpec

from engine import interrupts
from engine.cluster.hosts import is_local
from engine.control import protocol
from engine.control.signals import WARNING, handled
from engine.errors import BytescaleError, ExitCode, PreflightError, Problem, broken_gpu
from engine.launch.agents.commands import NodeCommand
from engine.launch.agents.launchers import Launcher, Starts, how_to_resume
from engine.launch.agents.nodes import POLL_S, End, Nodes
from engine.run.checkpoints import newest_first
from engine.run.flight_recorder import first_mismatch
from engine.run.folder import RunFolder
from engine.run.launches import STOPPED

P = ParamSpec("P")

_GRACE_S = 5.0  # after a failure, time for the other ranks to report their errors
_STACKS_S, _RECORDS_S = 3.0, 10.0  # for agents to write stacks, and for ranks on GPUs to write NCCL's records
_NAMED = 8  # most hosts whose names follow that of the first with the same problem
# Codes of ranks that may only have noticed that another one failed, the likelier causes first.
_CONSEQUENCES = (ExitCode.BUG, ExitCode.HANG)
# What NCCL's watchdog says when it aborts a rank: another rank is gone or waits elsewhere. An error of CUDA, which it
# may also be the first to meet, is the rank's own.
_WATCHDOG, _OWN = ("processgroupnccl", "nccl", "watchdog"), ("cuda error", "cuda failure")


class RankError(BytescaleError):
    """A rank failed. `code` is the rank's exit code, 128 + N if signal N killed it, or BUG if it gave no reason.

    `rank` and `host` are where the first failure was. If a whole host failed, `rank` is its first one. `hardware` says
    whether a GPU has failed.
    """

    traced = True

    def __init__(
        self, message: str, code: int, key: Path, hint: str, rank: int, host: str, hardware: bool = False
    ) -> None:
        super().__init__(message, key=str(key), hint=hint)
        self.code = code  # type: ignore[assignment]  # the code of a signal is not in the table
        self.rank, self.host, self.hardware = rank, host, hardware
        self.asked = False  # whether the run was also asked to stop


class PreemptedError(BytescaleError):
    """The run was asked to stop. It has a checkpoint to resume from, unless this is an InterruptedRunError."""

    code = ExitCode.PREEMPTED


class InterruptedRunError(PreemptedError):
    """The run was stopped before it had saved a checkpoint."""

    code = ExitCode.INTERRUPTED


def run_ranks(
    commands: Sequence[NodeCommand],
    folder: RunFolder,
    tick: Callable[[], None],
    say: Callable[[str], None],
    launcher: Launcher | None = None,
    paces: Callable[[int, float], None] = lambda rank, pace: None,
) -> None:
    """Start the ranks of all nodes and wait until all have ended; call `tick` every 0.05 s while waiting.

    The `launcher` brings the agents of the nodes; by default it starts them. `paces` gets each rank's pace once a
    second (engine/trainer/pace.py).

    Raises PreflightError if a host cannot run its ranks, RankError with the cause of the first failure, or
    PreemptedError if the run was asked to stop. When this returns or raises, all ranks have ended or were killed. If
    `tick` or `say` cannot write to a closed terminal, the run continues.
    """
    launcher = launcher or Starts()
    with _stop_requests() as requests:
        interrupts.check()
        try:
            with Nodes(commands, folder, launcher, paces) as nodes:
                _wait_for_agents(nodes, launcher, requests)
                if requests or nodes.asked_to_stop:
                    raise stopped_on_request(folder, bool(newest_first(folder.checkpoints)))
                nodes.start()
                asked = _wait(nodes, requests, folder, unfailing(tick), unfailing(say))
            _raise_first_failure(nodes.ends, nodes.hosts, folder, asked)
        except RankError as error:
            error.asked = bool(requests) or nodes.asked_to_stop
            raise


def _wait_for_agents(nodes: Nodes, launcher: Launcher, requests: Sequence[int]) -> None:
    """Wait until all agents have answered, `answer_s` after the last one that did.

    Raises PreflightError with the problems of the hosts that cannot be used, one for each cause.
    """
    last = time.monotonic() + launcher.answer_s
    silent, cut_short = nodes.nodes, False
    while silent and not requests and time.monotonic() < last:
        nodes.look(POLL_S)
        left = [node for node in nodes.nodes if not node.hello and not nodes.has_ended(node)]
        if nodes.ends and not cut_short:  # the others get some seconds to fail too, so that all are reported
            last, cut_short = min(last, time.monotonic() + _GRACE_S), True
        elif len(left) < len(silent) and not cut_short:  # many Pythons may start slowly from one file system
            last = time.monotonic() + launcher.answer_s
        silent = left
    problems = list[tuple[str, Problem]]()
    for node in nodes.nodes:
        end = nodes.ends.get(node.command.ranks[0])
        if end is not None and end.cause is not None:
            problems.append((node.command.host, replace(end.cause.problem, key=str(node.log))))
    if not problems:
        for node in silent:
            loss = launcher.absent(node.number)
            problems.append((node.command.host, Problem(f"{node.command.host} {loss}", str(node.log), loss.hint)))
    if problems and not requests:
        raise PreflightError.of(_by_cause(problems, nodes.nodes[0].log.parent))


def _changed(path: Path) -> tuple[int, int]:
    """Return the size of a file and when it was changed, in ns; zeros if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _by_cause(problems: Sequence[tuple[str, Problem]], logs: Path) -> list[Problem]:
    """Merge problems that differ only in the name of the host, which is given with each.

    Hosts beyond the first _NAMED others are counted, and their `logs`, a folder, are named.
    """
    alike = dict[tuple[str, str], list[tuple[str, Problem]]]()
    for host, problem in problems:
        name = host.rpartition("@")[2]  # ssh's messages leave out the user
        words = problem.message.replace(name, ""), (problem.hint or "").replace(name, "")
        alike.setdefault(words, []).append((host, problem))
    found = []
    for (_, first), *others in alike.values():
        message = first.message
        if others:
            message += f"; the same on {', '.join(host for host, _ in others[:_NAMED])}"
        if len(others) > _NAMED:
            message += f" and {len(others) - _NAMED:,} more, whose logs are in {logs}"
        found.append(replace(first, message=message))
    return found


def _wait(
    nodes: Nodes, requests: Sequence[int], folder: RunFolder, tick: Callable[[], None], say: Callable[[str], None]
) -> int:
    """Wait for all ranks; after a failure, only for the grace period. Returns the urgency of the requests to stop.

    While ranks have not begun the first step of this start, there is nothing to finish: a request ends them at once.
    Raises RankError if they hang.
    """
    # Agents say each second where their ranks are, so a first step may be done that none of them has named yet.
    before = _changed(folder.metrics)

    def starting() -> bool:
        return nodes.patience.starting and _changed(folder.metrics) == before

    deadline, asked = None, 0
    while len(nodes.ends) < len(nodes.hosts) and (deadline is None or time.monotonic() < deadline):
        nodes.look(POLL_S)
        # After the first failure, the other ranks get some time to end and to report why.
        if deadline is None and any(end.code not in (0, ExitCode.PREEMPTED) for end in nodes.ends.values()):
            deadline = time.monotonic() + _GRACE_S
        # A scheduler signals the agents too, and that is one request, whichever signal comes first.
        if max(_urgency(requests), nodes.asked_to_stop) > asked:
            nodes.tell(protocol.Kill() if asked else protocol.Stop())
            if not asked:
                at_once = "; press Ctrl-C again to stop immediately"
                if starting():
                    say("stopping: no step has begun")
                elif nodes.patience.reported:
                    say(f"stopping after this step, with a checkpoint{at_once}")
                else:
                    say(f"stopping as soon as the ranks have started{at_once}")
            asked += 1
        if asked == 1 and starting():
            nodes.tell(protocol.Kill())
            asked = 2
        tick()
        if not nodes.looked:
            continue
        if deadline is not None:
            continue
        gpus = nodes.nodes[0].command.work.gpus
        if (rank := nodes.stopped()) is not None:
            where = nodes.patience.where(rank)
            message = f"rank {rank} was stopped by a signal{where and f' in {where}'}; the others wait for it"
            if gpus:
                message += _recorded(nodes, folder, rank, _RECORDS_S)
            raise RankError(message, ExitCode.HANG, folder.log(rank), how_to_resume(folder), rank, nodes.hosts[rank])
        if (hang := nodes.patience.hang()) is not None:
            rank = hang.rank
            message = hang.message + _recorded(nodes, folder, rank, _RECORDS_S if gpus else _STACKS_S)
            also = f", and operations of NCCL are in {folder.nccl_record(0).with_name('nccl-rank-*')}" if gpus else ""
            hint = f"what its threads do is in its log{also}; {how_to_resume(folder)}"
            raise RankError(message, ExitCode.HANG, folder.log(rank), hint, rank, nodes.hosts[rank])
    tick()
    return max(asked, _urgency(requests), nodes.asked_to_stop)


def _recorded(nodes: Nodes, folder: RunFolder, rank: int, seconds: float) -> str:
    """Let agents write the stacks of ranks, and ranks on GPUs NCCL's records: the error that follows ends them.

    Returns which operation of NCCL cannot end, as `_of_nccl`.
    """
    nodes.tell(protocol.Stacks())
    last = time.monotonic() + seconds
    while time.monotonic() < last:
        nodes.look(POLL_S)
    return _of_nccl(folder, len(nodes.hosts), rank)


def _urgency(requests: Sequence[int]) -> int:
    """Return 0 without requests to stop, 1 if the ranks should save and end, 2 if they should end at once.

    The second request stops immediately. A warning does not count as a request.
    """
    return min(2, max(bool(requests), sum(number != WARNING for number in requests)))


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Handle signals that ask the ranks to stop, and yield the list of those received, for `_urgency`.

    The handler prints nothing: it may interrupt another print, and printing may fail.
    """
    requests: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        requests.append(number)

    before = {number: signal.signal(number, handle) for number in handled()}
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


def _raise_first_failure(ends: Mapping[int, End], hosts: Mapping[int, str], folder: RunFolder, urgency: int) -> None:
    """Raise RankError for the rank that failed first, or PreemptedError if ranks only stopped on request.

    Does nothing if no rank failed. `urgency` is that of the requests to stop.
    """
    failed = {rank: end for rank, end in ends.items() if end.code != 0}
    # Exit codes of ranks that were asked to stop. A scheduler may signal the ranks too, even before they handle
    # signals; after a second request all are killed, and an unexpected error then only means that a rank noticed it.
    stopped: tuple[int, ...] = (ExitCode.PREEMPTED, -signal.SIGTERM, -WARNING, -signal.SIGKILL)
    stopped = stopped[: (1, 3, 4)[urgency]]
    blamed = {rank: end for rank, end in failed.items() if end.cause is not None or end.code not in stopped}
    if urgency > 1:
        of_ranks = {rank: end for rank, end in blamed.items() if not _by_watchdog(end)}
        blamed = {rank: end for rank, end in of_ranks.items() if (end.cause or end).code not in _CONSEQUENCES}
    if not blamed:
        if failed:
            saved = all(end.code == ExitCode.PREEMPTED for end in failed.values()) or newest_first(folder.checkpoints)
            raise stopped_on_request(folder, bool(saved))
        return

    def order(rank: int) -> tuple[int, float]:
        """Sort key: the first failure is smallest. What another rank's failure may have caused comes last."""
        cause = blamed[rank].cause
        if _by_watchdog(blamed[rank]):
            return 1 + len(_CONSEQUENCES), blamed[rank].seen
        if cause is None or cause.whole or cause.code not in _CONSEQUENCES:
            return 0, blamed[rank].seen
        return 1 + _CONSEQUENCES.index(cause.code), blamed[rank].seen

    rank = min(blamed, key=order)
    end, cause = blamed[rank], blamed[rank].cause
    logs, host = f"the logs of all ranks are in {folder.logs}", hosts[rank]
    failed_with = partial(RankError, key=folder.log(rank), rank=rank, host=host)
    if cause is not None:
        problem = cause.problem
        place = f" ({problem.key})" if problem.key else ""
        message = problem.message if cause.whole else f"rank {rank} failed: {problem.message}{place}"
        raise failed_with(message, cause.code, hint=problem.hint or logs, hardware=cause.hardware)
    if _by_watchdog(end):
        message = f"rank {rank} was aborted by NCCL's watchdog, which waits for other ranks: {end.said}"
        message += _of_nccl(folder, len(hosts), rank)
        raise failed_with(message, ExitCode.HANG, hint=f"check the network between the hosts; {how_to_resume(folder)}")
    if end.code < 0 and (broken := broken_gpu(end.said, f"the GPU of rank {rank} on {host}")):  # the watchdog met it
        raise failed_with(broken.message, ExitCode.PREFLIGHT, hint=broken.hint or logs, hardware=True)
    if end.code < 0:  # a signal killed it, so it wrote no cause
        message = f"rank {rank} was killed by {signal.Signals(-end.code).name}"
        if -end.code == signal.SIGKILL:
            message += " (Linux does this when a host runs out of memory)"
        if -end.code == signal.SIGBUS:
            message += " (Linux does this when a file in memory finds no space, for example in a full /dev/shm)"
        raise failed_with(message, 128 - end.code, hint=how_to_resume(folder))
    if end.code == ExitCode.STORAGE:  # the rank could not write the cause either
        message = f"rank {rank} could not write its files: the disk is full, or storage failed"
        raise failed_with(message, end.code, hint=f"free some space; then {how_to_resume(folder)}")
    place = "" if is_local(host) else f" on {host}"
    said = f": {end.said}" if end.said else " without an error message"
    message = f"rank {rank}{place} exited with code {end.code}{said}"
    raise failed_with(message, ExitCode.BUG, hint=logs)


def _of_nccl(folder: RunFolder, ranks: int, rank: int) -> str:
    """Say which operation of NCCL cannot end, as the end of a message about a rank; empty if no record shows it."""
    found = first_mismatch(folder, ranks, rank)
    return f"; NCCL: {found}" if found else ""


def _by_watchdog(end: End) -> bool:
    """Return whether NCCL's watchdog has aborted a rank because of another one."""
    said = end.said.lower()
    signs = any(sign in said for sign in _WATCHDOG) and not any(sign in said for sign in _OWN)
    return end.cause is None and end.code == -signal.SIGABRT and signs


def stopped_on_request(folder: RunFolder, saved: bool) -> PreemptedError:
    """Build the error of a run that was asked to stop. `saved` says whether there is a checkpoint."""
    error = PreemptedError if saved else InterruptedRunError
    return error(STOPPED, key=str(folder.root), hint=how_to_resume(folder))
