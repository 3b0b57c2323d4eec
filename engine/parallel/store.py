"""PyTorch's store over the agents of the nodes, so that no port listens for it (engine/control/keys.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache

from torch._C._distributed_c10d import HashStore, Store

from engine.control.control import Control

# Keys that a thread of NCCL requests each second on every rank, to see whether another rank has failed or writes a
# dump. Source: kStoreDumpKey and kStoreErrorSignalKey in torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp.
_POLLED = ("exception_dump", "remote_error")
_ABSENT_S = 30.0  # for which one of them that was not set is reported as such without asking again


class AgentStore(Store):
    """Keys and values that all ranks share. Values are bytes. Waiting has no limit: the launcher ends ranks that wait.

    Threads of NCCL call it too.
    """

    def __init__(self, control: Control) -> None:
        super().__init__()
        self._control = control
        self._absent = dict[tuple[str, ...], float]()  # time of the last `check` for polled keys that found none

    def set(self, key: str, value: bytes | str) -> None:
        """Set the value of a key."""
        self._control.ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        """Wait until a key is set, and return its value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait until all keys are set, and return their values."""
        return [value.encode("latin-1") for value in self._control.ask("get", list(keys))]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        self.multi_get(keys)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set. For polled keys, the answer may be up to 30 s old."""
        wanted, now = tuple(keys), time.monotonic()
        if now - self._absent.get(wanted, -_ABSENT_S) < _ABSENT_S:
            return False
        found = bool(self._control.ask("check", list(keys)))
        if not found and all(key.rpartition("/")[2] in _POLLED for key in keys):  # process groups prefix them
            self._absent[wanted] = now
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return it."""
        return int(self._control.ask("add", key, amount))

    def compare_set(self, key: str, expected: bytes | str, value: bytes | str) -> bytes:
        """Set the value of a key if it has the expected one, and return its value."""
        found: str = self._control.ask("swap", key, _text(expected), _text(value))
        return found.encode("latin-1")

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was set."""
        return bool(self._control.ask("delete", key))

    deleteKey = delete_key  # noqa: N815 - the name by which C++ calls it

    def clone(self) -> AgentStore:
        """Return a store that another thread may use."""
        return self


@cache  # a process group keeps only the C++ half of the object
def store_of(control: Control) -> Store:
    """Return the store of the ranks to which this link belongs; a rank without an agent is alone."""
    return HashStore() if control.agent is None else AgentStore(control)


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else bytes(value).decode("latin-1")
