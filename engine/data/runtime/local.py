"""Plans in the background: a separate process chooses the documents of step k + 1 and plans it while step k runs.

There is one on each node. A plan is a pure function of lengths and settings, so nodes do not exchange plans. They only
compare digests (`Control.check_same`), to detect a node with a different plan. The first rank of the node has the
process, and passes what it answers on to the others, over sockets that the agent has given to them. The process has
loaders, which pack documents ahead. It imports no torch.

Because plans are a pure function, a planning process that dies or is stopped is replaced by another one, which gives
the same plan.
It is asked over a pipe: the queues of a process pool have semaphores, which are files in /dev/shm that a killed run
leaves behind.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from engine.config.schema import Config
from engine.control.processes import StopWatch, end_with_parent, is_stopped
from engine.data.blocks.loaders import Loaders, Work
from engine.data.corpus import TextCorpus, corpora_of
from engine.data.parts import LeftOut
from engine.data.quarantine import Unusable
from engine.data.steps import TOKEN_BYTES, Cursor, SequenceTable, Steps
from engine.data.workers import cores
from engine.errors import BytescaleError, ExitCode, MemoryFitError
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.run.folder import RunFolder
from engine.simulator.timeline import simulate, useful

_MOST_LOADERS = 8  # of a host, unless the config says more
_ATTEMPTS = 3  # planning processes that may die of a step, or be stopped
_LOOK_S = 0.2  # between two looks at a planning process
_CLOSE_S = 5.0  # for it to end its loaders
# Not a fork, which would copy threads and communicators.
_CONTEXT: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
_AHEAD_STEPS = 4  # whose blocks are packed ahead, if tokens have TOKEN_BYTES bytes of text


@dataclass(frozen=True)
class Planned:
    """A planned step: its sequences, its plan, the simulated balance of the plan, and the cursor of the next step.

    `step_s` is the simulated time of the step, in seconds on the planned hardware; `flops` are its model FLOPs.
    `unusable` are documents left out of blocks first opened for this step; after a resume some may be listed already.
    `ended` says why there is no step after this one, as `Steps.ended`.
    """

    table: SequenceTable
    plan: StepPlan
    balance: float
    step_s: float
    flops: int
    after: Cursor
    unusable: list[Unusable]
    ended: str | None


class PlanAhead:
    """Plans one step at a time in another process: `request` starts planning, `take` waits for the plan.

    All ranks of a node must call the same methods in the same order.
    """

    def __init__(
        self, folder: RunFolder, config: Config, settings: PlanSettings, sockets: Sequence[int] = (), first: bool = True
    ) -> None:
        """Take the NODE_SOCKETS of this rank. The `first` rank of the node starts the process."""
        connections = [Connection(descriptor) for descriptor in sockets]
        self._source: _Process | _FirstRank
        if first:
            self._source, self._others = _Process(folder, config, settings), connections
        else:
            self._source, self._others = _FirstRank(*connections), []

    def request(self, cursor: Cursor) -> None:
        """Start planning the step at `cursor`, of which `Steps.ended` has said that there is one."""
        self._source.ask(_Planner.step, cursor)

    def take(self) -> Planned:
        """Wait for the requested plan and return it. Raises any error of the planning process."""
        table, buffer, *rest = self._answer()
        return Planned(table, StepPlan.from_bytes(buffer), *rest)

    def validation(self) -> dict[str, tuple[SequenceTable, StepPlan]]:
        """Return the validation set of each source that has one, and its plan."""
        self._source.ask(_Planner.validation)
        found: dict[str, tuple[SequenceTable, bytes]] = self._answer()
        return {name: (table, StepPlan.from_bytes(buffer)) for name, (table, buffer) in found.items()}

    def _answer(self) -> Any:
        """Wait for the answer of the planning process, and pass it on. Raises the error of its work.

        Raises ConnectionError if another rank of the node has ended.
        """
        done, found = answer = self._source.answer()
        for other in self._others:
            other.send(answer)
        if not done:
            raise found
        return found

    def close(self) -> None:
        """End the planning process and its loaders."""
        for other in self._others:
            other.close()
        self._source.close()


class _Process:
    """The planning process, of the rank that has started it. It answers one question before the next is asked."""

    def __init__(self, *arguments: Any) -> None:
        """Start it. The arguments are those of _Planner."""
        self._arguments = arguments
        self._start()

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process: BaseProcess = _CONTEXT.Process(target=_serve, args=(theirs, *self._arguments))
        self._process.start()
        theirs.close()

    def ask(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Let it call a method of its _Planner."""
        self._asked = work, arguments
        with suppress(OSError):  # it has died; `answer` will see it
            self._connection.send(self._asked)

    def answer(self) -> tuple[bool, Any]:
        """Wait for the answer to the last `ask`: whether the method returned, and what it returned or raised.

        If the planning process dies, or a signal stops it for some seconds, another one is asked; if that happens
        several times, raises BytescaleError: with HANG if it was stopped, with MEMORY if it was killed, after which
        there is no restart.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            watch = StopWatch()
            try:
                while not self._connection.poll(_LOOK_S):
                    if watch.note(is_stopped(self._process.pid or 0)):
                        message, code = "the planning process was stopped by a signal", int(ExitCode.HANG)
                        self._process.kill()
                        break
                else:
                    return self._connection.recv()  # type: ignore[no-any-return]
            except (EOFError, OSError):
                self._process.join()
                ended = self._process.exitcode or 0
                message = f"the planning process ended with code {ended}"
                code = 128 - ended if ended < 0 else int(ExitCode.BUG)
                if ended == -signal.SIGKILL:  # as Linux does when a host runs out of memory
                    code = int(ExitCode.MEMORY)
            self.close()
            if attempt < _ATTEMPTS:
                logging.getLogger(__name__).warning("%s; another one plans this step again", message)
                self._start()
                work, arguments = self._asked
                self.ask(work, *arguments)
        hint = "Linux kills processes of a host that runs out of memory; the log of the rank has what else is known"
        error = (MemoryFitError if code == ExitCode.MEMORY else BytescaleError)(
            f"{message}, {_ATTEMPTS} times in one step", hint=hint
        )
        error.code = code  # type: ignore[assignment]  # the code of a signal is not in the table
        raise error

    def close(self) -> None:
        """End the process and its loaders."""
        self._connection.close()
        self._process.join(_CLOSE_S)
        self._process.kill()  # if it is stopped
        self._process.join()


class _FirstRank:
    """The first rank of the node, which asks the same questions and passes the answers on."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ask(self, work: Callable[..., Any], *arguments: Any) -> None:
        """The first rank asks."""

    def answer(self) -> tuple[bool, Any]:
        """Wait for the next answer. Raises ConnectionError if the first rank has ended."""
        try:
            return self._connection.recv()  # type: ignore[no-any-return]
        except EOFError:
            raise ConnectionError("the first rank of this node, which plans for it, has ended") from None

    def close(self) -> None:
        self._connection.close()


_Found = tuple[SequenceTable, bytes, float, float, int, Cursor, list[Unusable], str | None]


class _Planner:
    """The planning process."""

    def __init__(self, folder: RunFolder, config: Config, settings: PlanSettings) -> None:
        self.settings = settings
        self.steps = Steps(corpora_of(folder, config), config)
        self.texts = {corpus.name: corpus for corpus in self.steps.corpora if isinstance(corpus, TextCorpus)}
        self.ahead = _AHEAD_STEPS * TOKEN_BYTES * config.batch_tokens
        count = config.data.loaders or min(_MOST_LOADERS, max(1, cores() // 2))
        self.loaders = Loaders(count, config.data.spool) if self.texts else None
        self.unusable = list[Unusable]()  # of blocks that have been opened since the last step
        for corpus in self.texts.values():
            if self.loaders is not None:
                corpus.wait = self.loaders.wait
            corpus.opened = partial(self.note, corpus.name)

    def note(self, source: str, block: int, left_out: LeftOut) -> None:
        """Note which documents of a block cannot be used."""
        self.unusable += (Unusable(source, block, *one) for one in left_out.broken)

    def ask(self, blocks: Iterable[tuple[str, int]]) -> None:
        """Let the loaders pack blocks of sources of texts."""
        if self.loaders is not None:
            self.loaders.ask(self._works(blocks))

    def _works(self, blocks: Iterable[tuple[str, int]]) -> Iterator[Work]:
        texts = ((self.texts[name], block) for name, block in blocks if name in self.texts)
        return (Work(corpus.tokens, corpus.folder, corpus.block_list[block]) for corpus, block in texts)

    def step(self, cursor: Cursor) -> _Found:
        """Plan the step at a cursor. It is simulated here too, because that takes as long as planning."""
        self.ask(self.steps.upcoming(cursor, self.ahead))
        found = self.steps.next(cursor)
        assert found is not None, "the run has ended"
        table, after = found
        plan = plan_step(table.length, self.settings)
        ended = self.steps.ended(after)  # may open the next window, so before `unusable` is taken
        unusable, self.unusable = self.unusable, []
        makespan = simulate(plan, self.settings).makespan
        balance = useful(plan.sequence_lengths, self.settings) / makespan
        step_s = self.settings.costs.seconds(makespan + self.settings.costs.step)
        flops = self.settings.costs.flops(plan.sequence_lengths)
        return table, plan.to_bytes(), balance, step_s, flops, after, unusable, ended

    def validation(self) -> dict[str, tuple[SequenceTable, bytes]]:
        """Plan the validation set of each source."""
        validating = list(self.steps.validating())
        self.ask(validating)
        tables = self.steps.validation()
        if self.loaders is not None:  # they are read again and again
            self.loaders.keep(self._works(validating))
        return {name: (table, plan_step(table.length, self.settings).to_bytes()) for name, table in tables.items()}


def _serve(connection: Connection, *arguments: Any) -> None:
    """Do the work that the first rank asks for, until it closes the connection. `arguments` are those of _Planner."""
    _end_with_parent()
    planner: _Planner | None = None
    with suppress(EOFError, OSError):  # of the connection
        while True:
            work, given = connection.recv()
            try:
                planner = planner or _Planner(*arguments)
                answer = True, work(planner, *given)
            except Exception as error:
                traceback.print_exc()  # to the log of the rank, which raises the error without it
                answer = False, error
            connection.send(answer)
    if planner is not None and planner.loaders is not None:
        planner.loaders.close()


def _end_with_parent() -> None:
    """Make the planning process exit when its rank exits, even if the rank is killed, but not earlier.

    The system kills it then, also if a signal has stopped it; the thread is for a rank that has ended before.
    It ignores what a scheduler may send to all processes of a job: the rank needs plans until it has saved.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
