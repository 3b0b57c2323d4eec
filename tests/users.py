"""Lets functions run as other users of this machine, in processes of their own, where root runs the tests."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

GROUP, VICTIM, OTHER = 40000, 40001, 40002  # the users are both in the group
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run functions as other users")


class Running:
    """A function that runs as another user. It may `pause`, until the test lets it `resume`."""

    def __init__(self, user: int, function: Callable[[Callable[[], None]], None], home: Path) -> None:
        """Start `function(pause)`, with `home` as its home directory, and wait until it pauses or ends."""
        (reads, said), (goes, go) = os.pipe(), os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from Python 3.12 on: threads of this process are not in the new one
            self._child = os.fork()
        if self._child == 0:
            code = 1
            try:
                for handle in (reads, go):
                    os.close(handle)
                os.setgroups([GROUP])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                os.environ.update(HOME=str(home), XDG_CACHE_HOME=str(home))
                os.umask(0o002)

                def pause() -> None:
                    os.write(said, b"paused")
                    os.read(goes, 1)

                function(pause)
                code = 0
            except BaseException:
                with suppress(OSError):
                    os.write(said, traceback.format_exc().encode()[-4000:])
            finally:
                os._exit(code)
        os.close(said)
        os.close(goes)
        self._said, self._go = reads, go
        self._read()

    def _read(self) -> None:
        """Wait until the function pauses or ends. Fails the test if it raises an error."""
        found = os.read(self._said, 1 << 16).decode()
        self.paused = found == "paused"
        if not self.paused:
            os.waitpid(self._child, 0)
            os.close(self._said)
            os.close(self._go)
            assert not found, found

    def resume(self) -> None:
        """Let the function go on."""
        os.write(self._go, b"x")
        self._read()


def run_as(user: int, function: Callable[[], None], home: Path) -> None:
    """Run a function as another user. An error in it fails the test."""
    running = Running(user, lambda pause: function(), home)
    assert not running.paused
