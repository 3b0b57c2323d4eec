"""Ends a run whose loss or gradients are not finite, before it can save a useless checkpoint."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from engine.errors import BytescaleError, ExitCode
from engine.run.checkpoints import newest_first


class DivergedError(BytescaleError):
    """The loss or the gradient norm is not finite. The run is not retried, because it would diverge again."""

    code = ExitCode.USAGE


def check_finite(step: int, checkpoints: Path, **values: float) -> None:
    """Raise DivergedError unless all `values` of a step are finite. All ranks must pass the same values.

    `checkpoints` is the run's folder of checkpoints; the hint names the newest one.
    """
    if all(math.isfinite(value) for value in values.values()):
        return
    shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    kept = newest_first(checkpoints)
    action = "start again: run.out=NEW"
    if kept:
        action = f"resume into a new folder: run.out=NEW --resume {shlex.quote(str(kept[0]))}"
    raise DivergedError(f"training diverged at step {step}: {shown}", key="optimizer.lr", hint=f"lower it and {action}")
