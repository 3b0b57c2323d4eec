"""Copies the checkpoints of a run to `run.remote`, in a thread of the launcher, while the ranks train."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine import interrupts
from engine.errors import CheckpointError
from engine.readers import LARGE, read_bytes
from engine.run.checkpoints import MANIFEST, newest_first
from engine.run.remote import Remote

_POLL_S = 2.0
_RETRY_S = 10.0, 600.0  # first and longest wait after a failure; each is twice the one before
_LAST_WAIT_S = 20.0  # for the copies of a run that failed or was preempted: its scheduler may kill it soon


@contextmanager
def copies(checkpoints: Path, remote: Remote | None, step: int, say: Callable[[str], None]) -> Iterator[None]:
    """Copy finished checkpoints to `remote`, newest first, until the context ends and all are copied.

    Checkpoints there of steps after `step`, where the run begins, become unusable. A failure is a warning, and is tried
    again. After an error the context ends within 20 s, even if copies are missing; the next start copies them.
    """
    if remote is None:
        yield
        return
    copier = _Copier(checkpoints, remote, step, say)
    copier.start()
    try:
        yield
    except BaseException:
        copier.finish(_LAST_WAIT_S)
        raise
    copier.finish(None)


class _Copier(threading.Thread):
    def __init__(self, checkpoints: Path, remote: Remote, step: int, say: Callable[[str], None]) -> None:
        super().__init__(name="copies", daemon=True)
        self._checkpoints, self._remote, self._step, self._say = checkpoints, remote, step, say
        self._ending = threading.Event()
        self._copied = dict[str, bytes]()  # manifests by name
        self._failed = False

    def run(self) -> None:
        wait_s, abandoned = _RETRY_S[0], False
        while True:
            last = self._ending.is_set()  # before the checkpoints are listed
            try:
                if not abandoned:
                    for name in self._remote.abandon(self._step):
                        self._say(f"{self._remote.url}/{name} is newer than step {self._step}; it is not used any more")
                    abandoned = True
                while missing := self._missing():
                    self._copy(missing[0])
            except Exception as error:  # libraries of fsspec raise errors of many types; training must continue
                if not self._failed or last:
                    more = "" if last else "; trying again"
                    reason = " ".join(f"{type(error).__name__}: {error}".split())
                    self._say(f"warning: checkpoints could not be copied to {self._remote.url}: {reason}{more}")
                self._failed = True
            else:
                if self._failed:
                    self._say(f"checkpoints are copied to {self._remote.url} again")
                self._failed, wait_s = False, _RETRY_S[0]
            if last:
                return
            self._ending.wait(wait_s if self._failed else _POLL_S)
            wait_s = min(_RETRY_S[1], 2 * wait_s) if self._failed else wait_s

    def finish(self, limit_s: float | None) -> None:
        """Wait until the last copies are made or have failed, for at most `limit_s`, or until Ctrl-C."""
        self._ending.set()
        try:
            self.join(min(1.0, limit_s or 1.0))
            if self.is_alive():
                self._say(f"copying checkpoints to {self._remote.url}; Ctrl-C leaves them to the next start")
                self.join(limit_s)
        except KeyboardInterrupt:
            interrupts.answered()
        if self.is_alive():
            self._say(f"warning: not all checkpoints are copied to {self._remote.url}; the next start copies them")

    def _missing(self) -> list[Path]:
        """List the checkpoints that may not have been copied yet, newest first."""
        found = []
        for folder in newest_first(self._checkpoints):
            with suppress(FileNotFoundError):  # it is being removed
                if self._copied.get(folder.name) != read_bytes(folder / MANIFEST, LARGE, CheckpointError):
                    found.append(folder)
        return found

    def _copy(self, folder: Path) -> None:
        try:
            manifest = read_bytes(folder / MANIFEST, LARGE, CheckpointError)
            self._remote.upload(folder)
        except Exception:
            if folder.exists():
                raise
            name, url = folder.name, self._remote.url
            self._say(f"warning: {name} was removed before it was copied to {url}; set a larger run.keep_checkpoints")
        else:
            self._copied[folder.name] = manifest
