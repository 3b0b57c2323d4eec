"""A CUDA stream for copies between a device and its host. Without a GPU, the same calls copy synchronously."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class CopyStream:
    """Copies tensors in order, while the device computes. Use one object per direction.

    The caller must keep references to the tensors of a copy until it has called `computing_waits` for it. After that,
    the computing stream reuses their memory only when the copy is complete. So `record_stream`, which would delay the
    reuse of memory, is not needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Copy (target, source) pairs, after all computation so far. Returns an event to wait for; None on CPUs."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return done

    def computing_waits(self, done: torch.cuda.Event | None = None) -> None:
        """Make later computation on the device wait for the copy with event `done`; without it, for all copies."""
        if self._stream is None:
            return
        computing = torch.cuda.current_stream(self._stream.device)
        if done is None:
            computing.wait_stream(self._stream)
        else:
            computing.wait_event(done)
