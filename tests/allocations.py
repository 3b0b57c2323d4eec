"""What PyTorch allocates on a CPU while something runs: the counterpart of `torch.cuda.max_memory_allocated`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch


class Allocated(NamedTuple):
    """Bytes beside those that were there before: the most at any moment, and those that are left."""

    peak: int
    left: int


def allocated(run: Callable[[], object]) -> Allocated:
    """Run something, on all of its threads, and return what it allocated. What it returns counts as left."""
    with torch.profiler.profile(profile_memory=True) as profile:
        kept = run()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = np.cumsum([0, *(size for _, size in changes)])
    del kept
    return Allocated(int(held.max()), int(held[-1]))
