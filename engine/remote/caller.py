"""Calls of roles of the data plane: a call ends with the answer of whichever actor has the role.

```
 sent to epoch 3, then                           the call
 an answer of epoch 3                            is done
 the actor has ended, or has another epoch       waits for a view; after some time it is sent again
 a view in which the role has epoch 5            is sent to epoch 5; what epoch 3 answers now is refused
 a view without the role                         gets RoleLostError
 the third actor has ended before it answered    gets MemoryFitError: the call is what ends them
```
Only the supervisor decides that an actor is replaced. A call may be sent any number of times, and calls that are open
together are answered in any order. So methods are pure functions of their arguments, or set a value that a caller sets
again and again, one call at a time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from engine.errors import BytescaleError, MemoryFitError
from engine.remote.view import Board, Member, View
from engine.selection import first_line

_LOOK_S = 0.1  # between two looks at the board while an answer is awaited
_RETRY_S = 1.0  # until an actor that did not answer, but keeps its role, is asked again
_ATTEMPTS = 3  # actors that may end, or be stopped, before they have answered a call


class Answer(NamedTuple):
    """What an actor has answered: a value, or the error that its method has raised."""

    epoch: int | None  # of the call; None: the actor refuses this epoch
    value: Any
    error: Exception | None = None


class Wire(Protocol):
    """Sends calls to actors."""

    def send(
        self, member: Member, method: str, arguments: tuple[Any, ...], answered: Callable[[Answer | None], None]
    ) -> None:
        """Send a call to a member. `answered` gets its answer in any thread, None if the member has ended.

        May raise any error: the call counts as one that got no answer.
        """
        ...


class RoleLostError(BytescaleError):
    """No actor has this role any more, and none will have it again."""


def _lost(role: str) -> RoleLostError:
    return RoleLostError(f"the data plane has no {role} any more")


class _Call:
    """A call that has no answer yet."""

    def __init__(self, role: str, method: str, arguments: tuple[Any, ...]) -> None:
        self.role, self.method, self.arguments = role, method, arguments
        self.future: Future[Any] = Future()
        self.epoch = 0  # to which it was last sent; 0: not yet
        self.actors = set[str]()  # to which it was sent
        self.unanswered: float | None = None  # since when it is known that there is no answer of this epoch


def _fatal(call: _Call) -> MemoryFitError:
    """Return the error of a call that no actor survives: the next one would probably not, either."""
    message = f"{len(call.actors)} processes of the data plane ended in a row during {call.method} of {call.role}"
    hint = "Linux kills processes of a host that runs out of memory; its system log, or those of Ray, may have details"
    return MemoryFitError(message, hint=hint)


class Caller:
    """Calls roles, from any thread. It looks at the board only while answers are awaited."""

    def __init__(self, board: Board, wire: Wire, clock: Callable[[], float] = time.monotonic) -> None:
        self._board, self._wire, self._clock = board, wire, clock
        self._changed = threading.Condition()
        self._calls = set[_Call]()
        self._view = View()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.refused = self.asked_again = 0

    def start(self, role: str, method: str, *arguments: Any) -> Future[Any]:
        """Call a role; the future gets the result, or the error of the method, RoleLostError, or MemoryFitError.

        While no actor has the role yet, the call waits for one.
        """
        call = _Call(role, method, arguments)
        with self._changed:
            if self._view.version > 0 and role not in self._view.members:
                call.future.set_exception(_lost(role))
                return call.future
            self._calls.add(call)
            member = self._assign(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="calls", daemon=True)
                self._thread.start()
            self._changed.notify()
        self._send(call, member)
        return call.future

    def call(self, role: str, method: str, *arguments: Any) -> Any:
        """Call a role and wait for the result. Raises errors as in `start`."""
        return self.start(role, method, *arguments).result()

    def close(self) -> None:
        """Stop looking at the board. Calls without an answer get RoleLostError."""
        with self._changed:
            self._closed = True
            left, self._calls = self._calls, set()
            self._changed.notify()
        for call in left:
            call.future.set_exception(RoleLostError(f"the call of {call.role} was given up"))

    def look(self) -> None:
        """Read the board once, and send calls whose roles have another epoch, or that had no answer for some time."""
        newer, again = self._board.newest(self._view.version), list[tuple[_Call, Member | None]]()
        failed = list[tuple[_Call, BytescaleError]]()
        with self._changed:
            if newer is not None and newer.version > self._view.version:
                self._view = newer
            for call in list(self._calls):
                known = self._view.members.get(call.role)
                if known is None and self._view.version > 0:
                    self._calls.remove(call)
                    failed.append((call, _lost(call.role)))
                elif known is not None and len(call.actors - {known.actor}) >= _ATTEMPTS:
                    self._calls.remove(call)
                    failed.append((call, _fatal(call)))
                elif known is not None and (known.epoch != call.epoch or self._is_due(call)):
                    self.asked_again += call.epoch != 0
                    again.append((call, self._assign(call)))
        # Outside the lock: futures call functions of others, which may start calls.
        for call, member in again:
            self._send(call, member)
        for call, error in failed:
            call.future.set_exception(error)

    def _is_due(self, call: _Call) -> bool:
        return call.unanswered is not None and self._clock() - call.unanswered >= _RETRY_S

    def _assign(self, call: _Call) -> Member | None:
        """Return the member that a call is now sent to. The caller holds the lock."""
        member = self._view.members.get(call.role)
        call.epoch, call.unanswered = (0 if member is None else member.epoch), None
        if member is not None:
            call.actors.add(member.actor)
        return member

    def _send(self, call: _Call, member: Member | None) -> None:
        """Send a call, unless no member has the role yet. If that fails, it is sent again as one without an answer."""
        if member is None:
            return
        try:
            self._wire.send(member, call.method, call.arguments, lambda got: self._answered(call, member.epoch, got))
        except Exception as error:
            message = "%s of %s cannot be called; trying again: %s"
            logging.getLogger(__name__).warning(message, call.method, call.role, first_line(error))
            self._answered(call, member.epoch, None)

    def _answered(self, call: _Call, epoch: int, answer: Answer | None) -> None:
        """Take an answer to a call that was sent to an epoch."""
        with self._changed:
            if call not in self._calls or call.epoch != epoch:
                self.refused += answer is not None and answer.epoch == epoch
                return
            if answer is None or answer.epoch != epoch:
                call.unanswered = self._clock()
                return
            self._calls.remove(call)
        if answer.error is not None:
            call.future.set_exception(answer.error)
        else:
            call.future.set_result(answer.value)

    def _follow(self) -> None:
        """Look at the board while there are calls without an answer."""
        failing = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed)
                if self._closed:
                    return
            try:
                self.look()
                failing = False
            except Exception:  # the board's process may be gone for a while; the supervisor and the agents watch it
                if not failing:
                    logging.getLogger(__name__).exception("the board cannot be read; trying again")
                failing = True
            time.sleep(_LOOK_S)
