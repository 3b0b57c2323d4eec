"""Plans in the background: a separate process chooses the documents of step k + 1 and plans it while step k runs.

Every rank computes the whole plan. A plan is a pure function of lengths and settings, so ranks do not exchange plans.
They only compare digests (`Control.check_same`), to detect a rank with a different plan. Of each host, the planning
process of the first rank has loaders, which pack documents ahead. The planning process imports no torch.

For the same reason a planning process that dies is replaced by another one, which gives the same plan. Ranks and
planning processes talk over pipes: the queues of a process pool have semaphores, which are files in /dev/shm that a
killed run leaves behind.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from engine.config.schema import Config
from engine.data.corpus import TextCorpus, corpora_of
from engine.data.loaders import Loaders, Work, wait_for_others
from engine.data.pack import LeftOut
from engine.data.quarantine import Unusable
from engine.data.steps import TOKEN_BYTES, Cursor, SequenceTable, Steps
from engine.data.workers import cores
from engine.errors import BytescaleError
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.run.folder import RunFolder
from engine.simulator.timeline import balance

_MOST_LOADERS = 8  # of a host, unless the config says more
_ATTEMPTS = 3  # planning processes that may die of a step
_AHEAD_STEPS = 4  # whose blocks are packed ahead, if tokens have TOKEN_BYTES bytes of text


@dataclass(frozen=True)
class Planned:
    """A planned step: its sequences, its plan, the simulated balance of the plan, and the cursor of the next step.

    `unusable` are documents left out of blocks first opened for this step; after a resume some may be listed already.
    `ended` says why there is no step after this one, as `Steps.ended`.
    """

    table: SequenceTable
    plan: StepPlan
    balance: float
    after: Cursor
    unusable: list[Unusable]
    ended: str | None


class PlanAhead:
    """Plans one step at a time in another process: `request` starts planning, `take` waits for the plan."""

    def __init__(self, folder: RunFolder, config: Config, settings: PlanSettings, loads: bool) -> None:
        """Start the process, which has loaders if `loads`."""
        self._arguments = folder, config, settings, loads
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy threads and communicators
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *self._arguments))
        self._process.start()
        theirs.close()

    def request(self, cursor: Cursor) -> None:
        """Start planning the step at `cursor`, of which `Steps.ended` has said that there is one."""
        self._ask(_Planner.step, cursor)

    def take(self) -> Planned:
        """Wait for the requested plan and return it. Raises any error of the planning process."""
        table, buffer, simulated, after, unusable, ended = self._answer()
        return Planned(table, StepPlan.from_bytes(buffer), simulated, after, unusable, ended)

    def validation(self) -> dict[str, tuple[SequenceTable, StepPlan]]:
        """Return the validation set of each source that has one, and its plan."""
        self._ask(_Planner.validation)
        found: dict[str, tuple[SequenceTable, bytes]] = self._answer()
        return {name: (table, StepPlan.from_bytes(buffer)) for name, (table, buffer) in found.items()}

    def _ask(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Let the planning process call a method of its _Planner. The answer must be taken before the next question."""
        self._asked = work, arguments
        with suppress(OSError):  # it has died; `_answer` will see it
            self._connection.send(self._asked)

    def _answer(self) -> Any:
        """Wait for the answer to the last `_ask`. Raises the error of the work.

        If the planning process dies, another one is asked; if that happens several times, raises BytescaleError.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                done, found = self._connection.recv()
            except (EOFError, OSError):
                self.close()
                message = f"the planning process ended with code {self._process.exitcode}"
                if attempt < _ATTEMPTS:
                    logging.getLogger(__name__).warning("%s; another one plans this step again", message)
                    self._start()
                    work, arguments = self._asked
                    self._ask(work, *arguments)
            else:
                if not done:
                    raise found
                return found
        hint = "Linux kills processes of a host that runs out of memory; the log of the rank has what else is known"
        raise BytescaleError(f"{message}, {_ATTEMPTS} times in one step", hint=hint)

    def close(self) -> None:
        """End the planning process and its loaders."""
        self._connection.close()
        self._process.join()


_Found = tuple[SequenceTable, bytes, float, Cursor, list[Unusable], str | None]


class _Planner:
    """The planning process."""

    def __init__(self, folder: RunFolder, config: Config, settings: PlanSettings, loads: bool) -> None:
        self.settings = settings
        self.steps = Steps(corpora_of(folder, config), config)
        self.texts = {corpus.name: corpus for corpus in self.steps.corpora if isinstance(corpus, TextCorpus)}
        self.ahead = _AHEAD_STEPS * TOKEN_BYTES * config.batch_tokens
        count = config.data.loaders or min(_MOST_LOADERS, max(1, cores() // 2))
        self.loaders = Loaders(count, config.data.spool) if loads and self.texts else None
        self.unusable = list[Unusable]()  # of blocks that have been opened since the last step
        for corpus in self.texts.values():
            corpus.wait = self.loaders.wait if self.loaders else wait_for_others
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
        """Plan the step at a cursor. The balance is simulated here too, because that takes as long as planning."""
        self.ask(self.steps.upcoming(cursor, self.ahead))
        found = self.steps.next(cursor)
        assert found is not None, "the run has ended"
        table, after = found
        plan = plan_step(table.length, self.settings)
        ended = self.steps.ended(after)  # may open the next window, so before `unusable` is taken
        unusable, self.unusable = self.unusable, []
        return table, plan.to_bytes(), balance(plan, self.settings), after, unusable, ended

    def validation(self) -> dict[str, tuple[SequenceTable, bytes]]:
        """Plan the validation set of each source."""
        validating = list(self.steps.validating())
        self.ask(validating)
        tables = self.steps.validation()
        if self.loaders is not None:  # they are read again and again
            self.loaders.keep(self._works(validating))
        return {name: (table, plan_step(table.length, self.settings).to_bytes()) for name, table in tables.items()}


def _serve(connection: Connection, *arguments: Any) -> None:
    """Do the work that the rank asks for, until it closes the connection. `arguments` are those of _Planner."""
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

    It ignores what a scheduler may send to all processes of a job: the rank needs plans until it has saved.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
