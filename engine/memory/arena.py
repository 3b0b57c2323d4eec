"""Bytes of the host that activations wait in: one pinned block a rank, handed out in turn and taken back at once.

Bytes and not shapes: micro-batches of HDP all have other lengths, and a pool of buffers by shape would grow with each.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import torch
from torch import Tensor

from engine.errors import MemoryFitError
from engine.memory import host

_LOG = logging.getLogger(__name__)
_ALIGNED = 512  # bytes: what a device's copy engine likes, and more than any dtype needs


class Arena:
    """At most `limit` bytes of the host, pinned where the device is a GPU. Grows between micro-batches only."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device, self._most_allowed, self._limit = device, limit, limit
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = self._most = 0
        self.short = 0  # bytes that the host did not give of what is needed now

    @property
    def size(self) -> int:
        """Return the bytes that are allocated."""
        return len(self._block)

    def reset(self, need: int) -> None:
        """Take everything back, and make room for `need` bytes, as far as the limit goes.

        Nothing may be in use any more. Room that the host does not give is asked for once more, half of it; what finds
        no place then stays on the device. Raises MemoryFitError where not even that is to be had.
        """
        self._used = 0
        if need > self.size and self.size < self._limit:
            self._grow(need)
        self.short = max(0, min(self._most_allowed, need) - self.size)

    def _grow(self, need: int) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
        enough = min(self._limit, need)
        self._block = self._allocate(min(self._limit, max(need, self._most * 5 // 4)), enough, enough // 2)
        self._most = self.size
        if self.size < enough:
            _LOG.warning("the host gave no %s bytes to offload to, so half as many are taken", f"{enough:,}")
            self._limit = self.size

    def _allocate(self, *sizes: int) -> Tensor:
        """Return the first of these sizes that the host gives."""
        for size in sizes:
            with suppress(RuntimeError):
                return host.allocate(size, self._device)
        hint = "set a smaller offload.ratio, or cluster.host_memory to what the host has for a rank"
        raise MemoryFitError(f"the host gave no {sizes[-1]:,} bytes to offload to", hint=hint)

    def take(self, size: int) -> Tensor | None:
        """Return `size` bytes, uint8 [size], that are the caller's until `reset`; None where there is no room."""
        start = -(-self._used // _ALIGNED) * _ALIGNED
        if start + size > self.size:
            return None
        self._used = start + size
        return self._block[start : self._used]
