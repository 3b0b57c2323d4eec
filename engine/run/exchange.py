"""Exchanges small values between ranks through files, for threads that must not call a collective."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from engine.files import write_json

_POLL_S = 0.02


class FileExchange:
    """An all-gather through a folder on the shared file system. Rank 0 collects the values and writes all of them.

    Each rank must call it equally often. It waits without a limit: a rank that fails ends the run, and with it this
    process. `folder` must be new.
    """

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._folder, self._rank, self._ranks, self._calls = folder, rank, ranks, 0

    def __call__(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the values of all ranks, in rank order."""
        self._calls += 1
        together = self._folder / f"{self._calls}.json"
        self._folder.mkdir(exist_ok=True)
        if self._rank:
            write_json(self._of(self._rank), value)
            return _wait(together)["values"]  # type: ignore[no-any-return]
        values = [value, *(_wait(self._of(rank)) for rank in range(1, self._ranks))]
        write_json(together, {"values": values})
        return values

    def _of(self, rank: int) -> Path:
        return self._folder / f"{self._calls}-{rank}.json"


def _wait(path: Path) -> dict[str, Any]:
    """Wait for a file that appears complete, and read it."""
    while True:
        try:
            return json.loads(path.read_text())  # type: ignore[no-any-return]
        except FileNotFoundError:
            time.sleep(_POLL_S)
