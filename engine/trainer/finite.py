"""A run whose numbers are no longer finite ends, and its last checkpoint stays the last good one."""

from __future__ import annotations

import math
from pathlib import Path

from engine.errors import BytescaleError, ExitCode
from engine.trainer.checkpoint import newest_first


class DivergedError(BytescaleError):
    """The loss or the gradients are not finite: to go on, or to try the same again, would only hide it."""

    code = ExitCode.USAGE


def check_finite(step: int, checkpoints: Path, **values: float) -> None:
    """Raise DivergedError, with all `values` of the step, unless they are finite. All ranks must pass the same."""
    if all(math.isfinite(value) for value in values.values()):
        return
    told = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    kept = newest_first(checkpoints)
    way = f"and go on in another run.out with --resume {kept[0]}" if kept else "and start again in another run.out"
    raise DivergedError(f"training diverged at step {step}: {told}", key="optimizer.lr", hint=f"lower it, {way}")
