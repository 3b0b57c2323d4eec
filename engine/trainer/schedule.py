"""The learning rate of each step. Does not import torch: the launcher reports what a longer run changes."""

from __future__ import annotations

import math

from engine.config.schema import Optimizer


def learning_rate(step: int, steps: int, settings: Optimizer) -> float:
    """Return the learning rate of update `step` (from 1) of `steps`.

    It grows linearly to `lr` during warm-up, then follows a cosine down to `min_lr_ratio * lr`.
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(steps - settings.warmup_steps, 1)
    floor = settings.min_lr_ratio
    return settings.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
