"""Memory of tensors on a CPU: the peak while a function runs, and the bytes allocated now.

The counterparts of `torch.cuda.max_memory_allocated` and `torch.cuda.memory_allocated`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class Allocated(NamedTuple):
    """Bytes in addition to those allocated before: the peak, and what is left at the end."""

    peak: int
    left: int


def allocated(run: Callable[[], object]) -> Allocated:
    """Count what `run` allocates on all of its threads. Its result counts as left."""
    with torch.profiler.profile(profile_memory=True) as profile:
        kept = run()
    # The profiler keeps the sizes of blocks by address even after they were released outside of a profile. If `run`
    # releases an older block at such an address, the profiler reports that size. So count only blocks allocated here.
    size_of: dict[int, int] = {}  # by address
    now = peak = 0
    for event in sorted(_memory_events(profile), key=lambda event: event.start_time_ns):
        size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
        now -= size_of.pop(address, 0)
        if size > 0:
            size_of[address] = size
            now += size
        peak = max(peak, now)
    del kept
    return Allocated(peak, now)


def _memory_events(profile: torch.profiler.profile) -> Iterator[Any]:
    """Find all allocations and releases in the tree of events; only the tree has their addresses."""
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            yield event


def start_counting() -> None:
    """Exclude all present objects from `held`, and from garbage collection: there are hundreds of thousands."""
    for _ in range(2):  # an unused engine of stage 2 is freed in two rounds
        gc.collect()
    gc.freeze()


def held() -> int:
    """Bytes of all live tensors created since `start_counting`, gradients included, each storage once."""
    least = _live_bytes()
    # gloo's threads release what they sent when they next get Python's lock, so count until nothing changes.
    for pause_s in (0.1, 0.1, 0.5, 0.5):
        time.sleep(pause_s)
        again = _live_bytes()
        if again == least:
            break
        least = min(least, again)
    return least


def _live_bytes() -> int:
    for _ in range(2):  # an unused engine of stage 2 is freed in two rounds
        gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.device.type != "meta":
                    found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(found.values())
