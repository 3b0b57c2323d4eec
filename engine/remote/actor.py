"""The process of a data plane that has a role, or stands by for one. Ray runs it as an actor; it does not know Ray.

```
 beat     alive, with pid and epoch          in a thread of its own, also while all others work
 become   take a role, or another epoch of it
 kill     SIGKILL to a process of this host: the actor that this one replaces
 answer   a call of an epoch; of any other it is refused
 clean    remove the files of the run on this host, at its end
```
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from engine.control.processes import start_of
from engine.errors import BytescaleError
from engine.remote.caller import Answer, Caller
from engine.remote.supervisor import Beat
from engine.remote.view import Process


class Role(Protocol):
    """What an actor does in a role: its other methods are those that can be called."""

    def close(self) -> None:
        """End what it has started."""
        ...


class Roles(Protocol):
    """Makes the objects of roles."""

    @property
    def loaders(self) -> int:
        """How many blocks a host packs at the same time, at most."""
        ...

    def warm(self) -> None:
        """Do in advance what takes long."""
        ...

    def make(self, role: str, epoch: int, caller: Caller, scratch: Path) -> Role:
        """Make a role with its first epoch. `scratch` is a folder of this host that exists as long as its Ray."""
        ...


class Actor:
    """See above. Each method but `become` may be called in several threads."""

    def __init__(self, roles: Roles, surroundings: Callable[[], tuple[Caller, Path]]) -> None:
        # Processes of multiprocessing would execute the file of the main module, which is Ray's.
        vars(sys.modules["__main__"]).pop("__file__", None)
        self._roles, self._surroundings = roles, surroundings
        self._process = Process(os.getpid(), start_of(os.getpid()) or 0)
        self._lock = threading.Lock()
        self._epoch, self._name = 0, ""
        self._role: Role | None = None
        self._error: Exception | None = None  # why it could not take its role
        with suppress(Exception):  # the role that needs it will raise it again
            roles.warm()

    def beat(self) -> Beat:
        """Answer the supervisor."""
        return Beat(self._process, self._epoch)

    def become(self, role: str, epoch: int) -> None:
        """Take a role. If that fails, each call gets the error, so that the rank which needs the role reports it."""
        if role != self._name:
            old, self._role, self._error = self._role, None, None
            try:
                if old is not None:
                    old.close()
                self._role = self._roles.make(role, epoch, *self._surroundings())
            except Exception as error:  # of another actor, too: it would be started for nothing
                self._note(error, f"{role} cannot be made")
                self._error = error
        self._name, self._epoch = role, epoch

    def kill(self, process: Process) -> None:
        """Kill a process of this host, if it is still the same one. A stopped one dies of SIGKILL, too."""
        if start_of(process.pid) == process.started:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)

    def clean(self) -> None:
        """Remove the files that the actors of this run have written on this host. No other one may be at work."""
        if self._role is not None:
            self._role.close()
        shutil.rmtree(self._surroundings()[1], ignore_errors=True)

    def answer(self, epoch: int, method: str, arguments: tuple[Any, ...]) -> Answer:
        """Call a method of the role."""
        if epoch != self._epoch:
            return Answer(None, None)
        if self._error is not None:
            return Answer(epoch, None, self._error)
        try:
            return Answer(epoch, getattr(self._role, method)(*arguments))
        except Exception as error:
            self._note(error, f"{method} of {self._name} failed")
            return Answer(epoch, None, error)

    def _note(self, error: Exception, what: str) -> None:
        """Log an error that does not explain itself where it is reported."""
        if not isinstance(error, BytescaleError):
            logging.getLogger(__name__).error("%s", what, exc_info=error)
