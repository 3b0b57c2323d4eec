"""AdamW on the host has to be compiled on this machine once: that is done, or refused, before any rank starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from engine.config.schema import Optimizer
from engine.errors import ConfigError
from engine.safe_path import safe_path

_PROGRAM = (sys.executable, "-m", "engine.zero.host_adam")
_LONGEST_S = 1800  # one core needs four minutes; a compiler that was killed may have left a lock, which is waited for


def check_host_adam(optimizer: Optimizer, say: Callable[[str], None]) -> None:
    """Compile what an optimizer on the host needs, if this machine has it not yet. Raises ConfigError if it cannot.

    In a process of its own: DeepSpeed talks on standard output. Other hosts compile when their ranks start.
    """
    if not optimizer.on_host or optimizer.name != "adamw":
        return
    say("optimizer.on_host: DeepSpeedCPUAdam is compiled now, unless this machine has it; that takes minutes, once")
    try:
        done = subprocess.run(
            _PROGRAM,
            env=os.environ | safe_path(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        raise _refusal(f"not done after {_LONGEST_S // 60} minutes; a file named lock may be left") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        told = [line for line in lines if "not found" in line or "error:" in line] or lines[-1:]
        raise _refusal(told[0] if told else f"exit code {done.returncode}")


def _refusal(why: str) -> ConfigError:
    hint = "it needs ninja and a C++ compiler; or set optimizer.on_host=false"
    return ConfigError(f"DeepSpeedCPUAdam cannot be compiled here: {why}", key="optimizer.on_host", hint=hint)
