"""Signals that ask a launch to stop."""

from __future__ import annotations

import signal

WARNING = signal.SIGUSR1  # a scheduler's, some time before it ends the job
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, WARNING)
