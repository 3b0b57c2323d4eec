"""Signals that ask a launch to stop."""

from __future__ import annotations

import signal
from collections.abc import Sequence

WARNING = signal.SIGUSR1  # a scheduler's, some time before it ends the job
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, WARNING)


def handled() -> list[signal.Signals]:
    """Return the stop signals to handle. nohup starts a process with SIGHUP ignored, and then it stays ignored."""
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def shielded(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` with the stop signals ignored.

    A scheduler may send them to all processes of a job, and then the launcher decides what ends. A shell ignores them,
    because `preexec_fn` is not safe in a process with threads.
    """
    names = " ".join(number.name.removeprefix("SIG") for number in STOP_SIGNALS)
    return ["/bin/sh", "-c", f"trap '' {names}; exec \"$@\"", "sh", *command]
