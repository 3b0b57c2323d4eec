"""A side stream for copies between a device and its host. On a CPU the same calls copy at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Lane:
    """Copies one way, in order, under what the device computes meanwhile.

    Memory that a copy reads or writes belongs to the caller until the stream that computes has waited for it
    (`computing_waits`). Only then may a tensor be let go: its memory goes back to the computing stream, whose later
    work comes after the copy. So nothing has to be recorded with the allocator, which would keep memory for longer.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> torch.cuda.Event | None:
        """Start to copy (target, source) pairs, when all that is computed so far is done; return what to wait for."""
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
        """Let what is computed from now on come after a copy, or after all that were started."""
        if self._stream is None:
            return
        computing = torch.cuda.current_stream(self._stream.device)
        if done is None:
            computing.wait_stream(self._stream)
        else:
            computing.wait_event(done)
