"""Compiles DeepSpeedCPUAdam on this machine before any rank starts, or refuses the launch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.errors import ConfigError
from engine.safe_path import safe_path

_PROGRAM = (sys.executable, "-m", "engine.zero.host_adam")
_TIMEOUT_S = 1800  # one core needs four minutes; if a killed compiler left its lock, the next one waits for it


def check_host_adam(config: Config, say: Callable[[str], None]) -> None:
    """Compile DeepSpeedCPUAdam if the config needs it and it is not yet compiled on this machine.

    Raises ConfigError if that fails. Other hosts compile it when their ranks start.
    """
    optimizer = config.optimizer
    if not optimizer.on_host or optimizer.name != "adamw":
        return
    say("optimizer.on_host: preparing DeepSpeedCPUAdam (compiled the first time on a machine, which takes minutes)")
    try:
        # In a separate process, because DeepSpeed prints to standard output.
        done = subprocess.run(
            _PROGRAM,
            env=os.environ | safe_path() | ({} if uses_gpus(config) else {"CUDA_VISIBLE_DEVICES": ""}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise _refusal(f"no result after {_TIMEOUT_S // 60} minutes; a killed compiler may have left a lock") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "not found" in line or "error:" in line] or lines[-1:]
        raise _refusal(errors[0] if errors else f"exit code {done.returncode}")


def _refusal(why: str) -> ConfigError:
    hint = "install ninja and a C++ compiler, or set optimizer.on_host=false"
    return ConfigError(f"cannot compile DeepSpeedCPUAdam: {why}", key="optimizer.on_host", hint=hint)
