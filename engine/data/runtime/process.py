"""A planning process: it answers requests of the rank that started it, and is replaced if it dies.

An object made in the process answers them; this module does not depend on what it plans. Answers must be pure functions
of the questions, so that another process gives the same answer if the first one has died or was stopped.

Requests go over a pipe. A process pool would leave its semaphores in /dev/shm when a run is killed.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from engine.control.processes import StopWatch, end_with_parent, is_stopped
from engine.errors import BytescaleError, ExitCode, MemoryFitError

_ATTEMPTS = 3  # planning processes that may die of a question, or be stopped
_LOOK_S = 0.2  # between two checks of a planning process
_CLOSE_S = 5.0  # for it to end its own processes
# Not a fork, which would copy threads and communicators.
_CONTEXT: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")


class Answers(Protocol):
    """The object whose methods answer questions in the planning process."""

    def close(self) -> None:
        """End the processes that the object has started."""
        ...


class PlanningProcess:
    """The planning process, of the rank that has started it. It answers one question before the next is asked."""

    def __init__(self, make: Callable[[], Answers]) -> None:
        """Start it. `make` is pickled; it is called in the process with the first question."""
        self._make = make
        self._start()

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        # A rank may be bound to the NUMA node of its GPU. This process and its loaders work for the whole host, and run
        # where the rank's agent may run.
        processors = os.sched_getaffinity(os.getppid()) if hasattr(os, "sched_getaffinity") else set[int]()
        self.process: BaseProcess = _CONTEXT.Process(target=_serve, args=(theirs, self._make, processors))
        self.process.start()
        theirs.close()

    def ask(self, question: Callable[..., Any], *arguments: Any) -> None:
        """Let the process call `question`, a method of the class that `make` returns an object of."""
        self._asked = question, arguments
        with suppress(OSError):  # it has died; `answer` will see it
            self._connection.send(self._asked)

    def answer(self) -> tuple[bool, Any]:
        """Wait for the answer to the last `ask`: whether the method returned, and its result or error.

        If the planning process dies, or a signal stops it for some seconds, another one is started. If that happens
        several times, raises BytescaleError: with HANG if it was stopped, with MEMORY, which prevents a restart, if it
        was killed.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            watch = StopWatch()
            try:
                while not self._connection.poll(_LOOK_S):
                    if watch.note(is_stopped(self.process.pid or 0)):
                        message, code = "the planning process was stopped by a signal", int(ExitCode.HANG)
                        self.process.kill()
                        break
                else:
                    return self._connection.recv()  # type: ignore[no-any-return]
            except (EOFError, OSError):
                self.process.join()
                ended = self.process.exitcode or 0
                message = f"the planning process ended with code {ended}"
                code = 128 - ended if ended < 0 else int(ExitCode.BUG)
                if ended == -signal.SIGKILL:  # as Linux does when a host runs out of memory
                    code = int(ExitCode.MEMORY)
            # Another process gives the same answer, because a plan is a pure function of the cursor. So only the time
            # is lost.
            self.close()
            if attempt < _ATTEMPTS:
                logging.getLogger(__name__).warning("%s; another one plans this step again", message)
                self._start()
                question, arguments = self._asked
                self.ask(question, *arguments)
        # The next process would probably end in the same way, so the run ends with the exit code of the last cause.
        hint = "Linux kills processes of a host that runs out of memory; the log of the rank may have details"
        error = (MemoryFitError if code == ExitCode.MEMORY else BytescaleError)(
            f"{message}, {_ATTEMPTS} times in one step", hint=hint
        )
        error.code = code  # type: ignore[assignment]  # the code of a signal is not in the table
        raise error

    def close(self) -> None:
        """End the process, and those that it has started."""
        self._connection.close()
        self.process.join(_CLOSE_S)
        self.process.kill()  # if it is stopped
        self.process.join()


def _serve(connection: Connection, make: Callable[[], Answers], processors: set[int]) -> None:
    """Answer the questions of the rank until it closes the connection, on these processors."""
    with suppress(OSError):
        os.sched_setaffinity(0, processors)
    _end_with_parent()
    answers: Answers | None = None
    with suppress(EOFError, OSError):  # of the connection
        while True:
            question, arguments = connection.recv()
            try:
                answers = answers or make()
                answer = True, question(answers, *arguments)
            except Exception as error:
                traceback.print_exc()  # to the log of the rank, which raises the error without it
                answer = False, error
            connection.send(answer)
    if answers is not None:
        answers.close()


def _end_with_parent() -> None:
    """Make the planning process exit when its rank exits, even if the rank is killed, but not earlier.

    The system kills it then, also if a signal has stopped it; the thread is for a rank that has ended before. It
    ignores signals that a scheduler may send to all processes of a job: the rank needs plans until it has saved a
    checkpoint.
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
