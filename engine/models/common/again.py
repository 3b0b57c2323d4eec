"""What a part of a layer keeps from its forward pass for when the layer is computed again (engine/models/recompute.py).

Most parts compute the same values again. A part whose decisions other ranks have followed keeps them: a kernel that
rounds otherwise, such as another attention kernel in autograd's thread, must not change them.
"""

from __future__ import annotations

import threading
from typing import Any


class _Now(threading.local):
    """The pass of a recomputed layer that this thread runs: autograd's thread runs the second one."""

    running: _Pass | None = None


_now = _Now()


def kept() -> list[Any] | None:
    """Return the list in which the caller keeps values, if it is in a layer that is computed again, else None.

    It is empty in the first pass. In the second one it is that of the same call, by the order of calls in the layer.
    """
    return None if _now.running is None else _now.running.next()


def passes() -> tuple[_Pass, _Pass]:
    """Return the contexts of the two passes of a layer, for `torch.utils.checkpoint`."""
    lists = list[list[Any]]()
    return _Pass(lists), _Pass(lists)


class _Pass:
    """A pass of a layer, during which `kept` returns the lists of the layer."""

    def __init__(self, lists: list[list[Any]]) -> None:
        self._lists = lists

    def __enter__(self) -> None:
        self._outer, _now.running, self._calls = _now.running, self, 0

    def __exit__(self, *error: object) -> None:
        _now.running = self._outer

    def next(self) -> list[Any]:
        if self._calls == len(self._lists):
            self._lists.append([])
        self._calls += 1
        return self._lists[self._calls - 1]
