"""Ctrl-C, and other signals that end a command, until its ranks run.

Python raises KeyboardInterrupt wherever the main thread is. Libraries do not always pass it on:

| where | what becomes of it |
|---|---|
| a finalizer, a callback from C | it is printed as ignored, and the command continues |
| OmegaConf: an error in its clean-up, a handler of all errors | another error replaces it |
| llvmlite: a callback from LLVM | LLVM uses a result that was not returned, and may crash |

So a signal is also recorded: any error after it is an interruption, and a command checks for a lost one before it
prints its result or starts ranks. A KeyboardInterrupt that was ignored is raised again, and none is raised in llvmlite.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_AGAIN_S = 0.02  # until a signal is sent again
_FRAGILE = "llvmlite"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

_received: int | None = None  # the last signal that nothing has answered
_timer = threading.Timer(0, lambda: None)  # sends it again


@contextmanager
def raised() -> Iterator[None]:
    """Raise KeyboardInterrupt for the signals that end a command, in this context. One that is ignored stays so.

    A launcher may handle them otherwise within it. May be called by the main thread only.
    """
    answered()
    before = dict[int, Any]()
    hook = sys.unraisablehook

    def again(found: Any) -> None:
        if _received is not None and issubclass(found.exc_type, KeyboardInterrupt):
            _send_again(_received)
        else:
            hook(found)

    try:
        for number in _ENDING:
            if (handler := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = handler
                signal.signal(number, handle)
        sys.unraisablehook = again
        yield
    finally:
        _timer.cancel()
        sys.unraisablehook = hook
        for changed, handler in before.items():
            signal.signal(changed, handler)


def handle(number: int, frame: FrameType | None) -> None:
    """Record a signal and raise KeyboardInterrupt; in llvmlite, send it again instead. A handler of `signal.signal`."""
    global _received
    _received = number
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_FRAGILE):
            _send_again(number)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _send_again(number: int) -> None:
    global _timer
    _timer.cancel()
    _timer = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    _timer.daemon = True
    _timer.start()


def check() -> None:
    """Raise KeyboardInterrupt if a signal was received that nothing has answered."""
    if _received is not None:
        raise KeyboardInterrupt


def answered() -> None:
    """Forget the signals received so far. For callers that catch their KeyboardInterrupt and continue."""
    global _received
    _timer.cancel()
    _received = None


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is an interruption: a KeyboardInterrupt, or any error since a signal was received."""
    return isinstance(error, KeyboardInterrupt) or _received is not None
