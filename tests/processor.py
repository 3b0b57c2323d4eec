"""Measures the processor time of a command, which depends less on other programs on the machine than time does."""

from __future__ import annotations

import os
import subprocess


def processor_seconds(command: list[str]) -> float:
    """Return the seconds that a command that must succeed keeps processors busy, its children's included.

    It may keep its compiled modules, as it does unless PYTHONDONTWRITEBYTECODE is set: compiling them all again takes a
    fifth of the time of a short command.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = os.times()
    subprocess.run(command, capture_output=True, check=True, env=environment)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system
