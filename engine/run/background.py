"""Writes checkpoints in a background thread, one at a time, while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.run.checkpoints import Exchange, Range, Share, TrainState, write


class BackgroundWriter:
    """Writes the checkpoints of a run, one at a time. Each rank has one.

    The threads call no collectives: those of the training step may be in progress, and two threads would call them in
    another order on each rank.
    """

    def __init__(self, checkpoints: Path, rank: int, token: str, control: Exchange) -> None:
        """`token` and `control` are those of `write`."""
        self._checkpoints, self._rank, self._token, self._control = checkpoints, rank, token, control
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(
        self,
        state: TrainState,
        save_tensors: Callable[[Path, Share], Iterable[Range]],
        then: Callable[[Path], None],
    ) -> None:
        """Begin to write a checkpoint (see `write`); on rank 0, call `then(folder)` when it is published.

        Waits first, if the last one is still being written.
        """
        self.wait()

        def work() -> None:
            try:
                written = write(self._checkpoints, state, self._rank, save_tensors, self._token, self._control)
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
        """Wait until this rank has written its part, and rank 0 the checkpoint. Raises the error of the thread."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()
