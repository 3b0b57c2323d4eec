"""Decisions of a recomputed layer's first pass, which its second pass must not make again (engine/models/recompute.py).

Most parts of a layer compute the same values in both passes. A router decides where tokens go, and other ranks have
already received them: in the second pass, a kernel that rounds differently, such as another attention kernel in
autograd's thread, could change its choice. So it stores the choice in the first pass, and reads it in the second.
"""

from __future__ import annotations

import threading
from typing import Any


class _OfThread(threading.local):
    """The pass that this thread runs: autograd's thread runs the second one."""

    running: _Pass | None = None


_of_thread = _OfThread()


def stored_decisions() -> list[Any] | None:
    """Return the list that stores the decisions of this call, or None outside of a recomputed layer.

    In the first pass it is empty, and the caller adds its decisions. In the second pass it has those of the same call:
    calls are known by their order in the layer.
    """
    return None if _of_thread.running is None else _of_thread.running.next_call()


def first_and_second_pass() -> tuple[_Pass, _Pass]:
    """Return the contexts of the two passes of a layer, as the `context_fn` of `torch.utils.checkpoint`."""
    calls = list[list[Any]]()
    return _Pass(calls), _Pass(calls)


class _Pass:
    """The context of a pass; both passes of a layer share the decisions by call."""

    def __init__(self, calls: list[list[Any]]) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._outer, _of_thread.running, self._number = _of_thread.running, self, 0

    def __exit__(self, *error: object) -> None:
        _of_thread.running = self._outer

    def next_call(self) -> list[Any]:
        """Return the decisions of the next call in this pass."""
        if self._number == len(self._calls):
            self._calls.append([])
        self._number += 1
        return self._calls[self._number - 1]
