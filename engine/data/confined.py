"""Calls functions that run code from others, such as chat templates, in a process with limits on memory and time.

A loop of 10^10 rounds, or a text of 10^10 characters, then ends that process and not this one. It is started at the
first call, serves all calls of this process one after the other, and ends with it. A call costs about .1 ms.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from engine.control.signals import shielded
from engine.errors import DataError, Problem
from engine.readers import parse_line
from engine.safe_path import safe_path

MEMORY = 1 << 30  # bytes, and MEMORY_EACH more for each byte of the arguments
MEMORY_EACH = 64
SECONDS = 10.0  # of processor time
# Its libraries would reserve memory for threads that it does not need, and one that warns is not wrong.
_ENVIRONMENT = {
    **{"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1"},
    **{"TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"},
}


def call(
    function: Callable[..., Any],
    *arguments: Any,
    what: str,
    hint: str,
    seconds: float = SECONDS,
    key: str | None = None,
) -> Any:
    """Return `function(*arguments)`, computed in the confined process. `function` is found by its name.

    Arguments and the result travel as JSON: a pickle of the result could run code here. The process may work in another
    folder. Raises DataError, `what` with the reason, and `key` and `hint`, if the call takes more than `seconds` of
    processor time or MEMORY, ends its process, or raises anything but a DataError, which passes.
    """
    request = json.dumps([function.__module__, function.__qualname__, arguments, seconds], default=str).encode()
    with _lock:
        process = _processes.get(os.getpid()) or _Process()
        _processes.clear()  # those of a parent are not ours; and after an error or Ctrl-C, a reply may be on its way
        try:
            answer = process.answer(request, seconds)
        except BaseException:
            process.close()
            raise
        if answer.get("survives"):
            _processes[os.getpid()] = process
        else:
            process.close()
    if (why := answer.get("failed")) is not None:
        raise DataError(f"{what} {why}", key=key, hint=hint)
    if problems := answer.get("problems"):
        raise DataError.of([Problem(*one) for one in problems])
    return answer["result"]


_lock = threading.Lock()
_processes = dict[int, "_Process"]()  # by the process that has started it; a fork copies this


class _Process:
    """The confined process."""

    def __init__(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            shielded([sys.executable, "-m", "engine.data.confined", str(theirs.fileno())]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | safe_path() | _ENVIRONMENT,
        )
        theirs.close()
        self._at_exit = Finalize(None, self.close, exitpriority=1)

    def answer(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Return the answer to a request: its result, or the problems to raise, or how it failed."""
        try:
            self._connection.send_bytes(request)
            answer: dict[str, Any] = parse_line(self._connection.recv_bytes())
            return answer
        except (EOFError, OSError):
            code = self._process.wait()
        why = f"ended its process ({signal.Signals(-code).name if code < 0 else f'exit code {code}'})"
        if code == -signal.SIGPROF:
            why = f"takes more than {seconds:,.0f} s of processor time"
        elif code == -signal.SIGKILL:
            why = "was killed, possibly because the memory of this host was full"
        return {"failed": why}

    def close(self) -> None:
        """End the process."""
        self._at_exit.cancel()
        self._connection.close()
        self._process.kill()
        self._process.wait()


def serve(connection: Connection) -> None:
    """Answer requests until the pipe closes, or memory has run out."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    own = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    survives, set_to = True, 0
    with suppress(EOFError, OSError):
        while survives:
            content = connection.recv_bytes()
            memory = MEMORY + MEMORY_EACH * (len(content) >> 20 << 20)
            if memory != set_to:
                _, hard = resource.getrlimit(resource.RLIMIT_AS)
                limit = own + memory if hard == resource.RLIM_INFINITY else min(own + memory, hard)
                resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
                set_to = memory
            answer, survives = _answer(content, memory)
            connection.send_bytes(answer)


def _answer(request: bytes, memory: int) -> tuple[bytes, bool]:
    """Return the answer to a request, as JSON, and whether another one can follow."""

    def failed(why: str, survives: bool = True) -> tuple[bytes, bool]:
        return json.dumps({"failed": why[:500], "survives": survives}).encode(), survives

    module, name, arguments, seconds = parse_line(request)
    try:
        function = getattr(import_module(module), name)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends this process, whatever it is doing
        return json.dumps({"result": function(*arguments), "survives": True}).encode(), True
    except DataError as error:
        problems = [[one.message, one.key, one.hint] for one in error.problems]
        return json.dumps({"problems": problems, "survives": True}).encode(), True
    except MemoryError:
        return failed(f"needs more than {memory >> 20:,} MiB of memory", survives=False)
    except RecursionError:
        return failed("calls itself too often, or is too deep")
    except BaseException as error:  # a panic of a Rust library is not an Exception
        return failed(f"fails: {type(error).__name__}: {error}", isinstance(error, Exception))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
