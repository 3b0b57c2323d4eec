"""Writes checkpoints in a background thread, one at a time, while training goes on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from engine.files import draft_of
from engine.run.checkpoints import TrainState, write
from engine.run.exchange import FileExchange


class BackgroundWriter:
    """Writes the checkpoints of a run, one at a time. Each rank has one.

    The threads of the ranks exchange their facts through files, not by collectives: those of the training step are in
    progress meanwhile, and two threads would call them in another order on each rank.
    """

    def __init__(self, checkpoints: Path, rank: int, ranks: int) -> None:
        self._checkpoints, self._rank, self._ranks = checkpoints, rank, ranks
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._started = 0

    def start(self, state: TrainState, save_tensors: Callable[[Path], None], then: Callable[[Path], None]) -> None:
        """Begin to write a checkpoint; on rank 0, call `then(folder)` when it is published.

        Every rank must have called `wait` before any rank calls this.
        """
        self.clean()
        self._started += 1
        exchange = FileExchange(self._facts(), self._rank, self._ranks)

        def work() -> None:
            try:
                written = write(self._checkpoints, state, self._rank, save_tensors, exchange)
                if self._rank == 0:
                    then(written)
            except BaseException as error:  # raised in the main thread, by `check`
                self._error = error

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the background thread, if it failed."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until the checkpoint is published, if one is being written. Raises the error of the thread."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def clean(self) -> None:
        """Remove what the ranks exchanged. Every rank must have called `wait` before."""
        if self._rank == 0 and self._facts().exists():
            shutil.rmtree(self._facts())

    def _facts(self) -> Path:
        """The folder of the exchange; its name makes it a ruin, if the run is killed."""
        return draft_of(self._checkpoints / f"facts-{self._started}")
