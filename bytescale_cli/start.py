"""The entry point of `bytescale`. It imports the commands only when it runs, so that Ctrl-C then ends them silently."""

from __future__ import annotations

import signal


def start() -> int:
    """Run the command line of this process and return its exit code."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:  # not where Ctrl-C is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # else it would show the traceback of an import
    from bytescale_cli.main import run

    return run()
