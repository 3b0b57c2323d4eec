"""One rank's process: joins the groups, trains, and says why it ended.

The exit code is the error's own; the cause goes to `RUN/logs/rank-N.error.json`, where the launcher looks for it. A
rank lives as long as its launcher: its standard input is a pipe that the launcher holds. A byte there asks the rank to
stop, through ssh too and from the rank's first moment on; when the pipe closes, the rank ends at once.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from engine.errors import BytescaleError, ExitCode, Problem
from engine.trainer.folder import RunFolder, write_json


def main(arguments: list[str]) -> int:
    """Run `python -m engine.trainer RUN [CHECKPOINT]`; return the exit code."""
    folder = RunFolder(Path(arguments[0]))
    checkpoint = Path(arguments[1]) if len(arguments) > 1 else None

    def work(stop: Callable[[], bool]) -> int:
        from engine.trainer.loop import train

        return train(folder, checkpoint, stop)

    return run_rank(folder, work)


def run_rank(folder: RunFolder, work: Callable[[Callable[[], bool]], int], saves: bool = True) -> int:
    """Run `work` as the rank that the launcher's environment names, and return its exit code.

    `work` gets a function that says whether the rank was asked to stop; one that saves nothing is ended then.
    """
    rank = int(os.environ["RANK"])
    stop = threading.Event()
    ask = stop.set if saves else partial(os._exit, ExitCode.PREEMPTED)
    threading.Thread(target=_heed_launcher, args=(ask,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: ask())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
    try:
        return work(stop.is_set)
    except BaseException as error:
        code, problem = explain(error)
        cause = {"code": int(code), "message": problem.message, "key": problem.key, "hint": problem.hint}
        failed_at = time.time()
        with suppress(OSError):
            traceback.print_exc()
        with suppress(OSError):  # on a full disk there is no room for the reason either; the exit code tells it
            write_json(folder.error(rank), cause | {"time": failed_at})
        return int(code)


def explain(error: BaseException) -> tuple[ExitCode, Problem]:
    """Return the exit code and the cause of an error in one sentence."""
    if isinstance(error, BytescaleError):
        return error.code, error.problems[0]
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return ExitCode.STORAGE, Problem(f"storage failed: {error.strerror}", error.filename)
    if any(sign in str(error) for sign in ("PytorchStreamWriter", "inline_container")):  # torch.save hides the OSError
        return ExitCode.STORAGE, Problem("storage failed while a checkpoint was written")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return ExitCode.MEMORY, Problem("out of memory", "capacity", "a smaller capacity needs less")
    text = str(error).strip().splitlines()
    return ExitCode.BUG, Problem(f"{type(error).__name__}: {text[0] if text else ''}")


def _heed_launcher(ask: Callable[[], None]) -> None:
    while os.read(0, 4096):  # not sys.stdin: its lock would still be held when Python shuts down
        ask()
    os._exit(ExitCode.BUG)
