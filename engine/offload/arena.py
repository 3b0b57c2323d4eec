"""Host memory for offloaded activations: one pinned block per rank, used from front to back and freed as a whole.

There is no pool of buffers by shape: it would grow with every micro-batch, because under HDP their lengths differ.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import torch
from torch import Tensor

from engine.errors import MemoryFitError
from engine.offload import pinned as host

_LOG = logging.getLogger(__name__)
_ALIGNMENT = 512  # bytes: suits the copy engines of GPUs, and every dtype


class Arena:
    """A block of at most `limit` bytes of host memory, pinned if the device is a GPU.

    The block starts empty and grows in `reset`, between micro-batches.
    """

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device, self._configured_limit, self._limit = device, limit, limit
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = self._largest = 0
        self._short = 0  # most bytes that a micro-batch needed, within `limit`, but the host could not allocate

    def another(self) -> Arena:
        """Create an empty arena for the same device, with the same limit."""
        return Arena(self._device, self._configured_limit)

    @property
    def size(self) -> int:
        """Allocated bytes, used or not."""
        return len(self._block)

    def reset(self, need: int) -> None:
        """Free all reserved memory, and grow the block if it is smaller than `need` bytes, up to the limit.

        Tensors from `take` must no longer be in use. If the host cannot allocate that much, the block gets half of it,
        which becomes the limit of later calls; `take` then returns None for some tensors, which stay on the device.
        Raises MemoryFitError if half fails too.
        """
        self._used = 0
        if need > self.size and self.size < self._limit:
            self._block = torch.empty(0, dtype=torch.uint8)  # frees the old block before the new one is allocated
            enough = min(self._limit, need)
            # Try 5/4 of the largest block so far first, so that slowly growing needs do not reallocate every time.
            for size in (min(self._limit, max(need, self._largest * 5 // 4)), enough, enough // 2):
                with suppress(RuntimeError):
                    self._block = host.allocate(size, self._device)
                    break
            else:
                hint = "set a smaller offload.ratio, or set cluster.host_memory to the host memory available per rank"
                raise MemoryFitError(f"could not allocate {enough // 2:,} bytes of host memory for offload", hint=hint)
            self._largest = self.size
            if self.size < enough:
                _LOG.warning("cannot allocate %s bytes of host memory for offload; using half as many", f"{enough:,}")
                self._limit = self.size
        self._short = max(self._short, min(self._configured_limit, need) - self.size)

    def pop_short(self) -> int:
        """Most bytes that a micro-batch needed but the host could not allocate, since the last call of this method."""
        short, self._short = self._short, 0
        return short

    def take(self, size: int) -> Tensor | None:
        """Reserve `size` bytes until the next `reset`: uint8 [size], or None if the block is full."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + size > self.size:
            return None
        self._used = start + size
        return self._block[start : self._used]
