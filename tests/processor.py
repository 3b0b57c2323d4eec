"""Measures the processor time of a command, which does not depend on other programs on the machine."""

from __future__ import annotations

import os
import subprocess


def processor_seconds(command: list[str]) -> float:
    """Return the seconds that a command that must succeed keeps processors busy, its children's included."""
    before = os.times()
    subprocess.run(command, capture_output=True, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system
