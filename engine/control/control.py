"""Collectives on a few plain values, which the agents of the nodes combine in a tree (reduction.py), and shared keys.

Sums of floating-point numbers are not among them: their order would depend on which message arrives first. Those are
left to the device (`Groups.sum`).
"""

from __future__ import annotations

import itertools
import math
import os
import select
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from engine.control.clock import AwakeClock
from engine.control.link import BEAT_S, SILENCE_S, Link
from engine.control.protocol import Alive, Answer, Ask, Meet, ProtocolError, Reduce, Result, Stop
from engine.control.reduction import COLLECT, GATHER, MAX, SHARE, UNORDERED, Operation
from engine.errors import ExitCode, PlanError

_NOTHING = -(1 << 512)  # below any digest: of a part without ranks


class Control:
    """A rank's link to its agent. All ranks must call the same collectives in the same order, each from one thread.

    Each transfers a constant number of bytes per rank at any world size, except `gather`. A rank that waits for others
    waits without a limit; the launcher ends it if one of them has failed or hangs.
    """

    def __init__(self, rank: int, agent: Link | None = None, stop: Callable[[], None] = lambda: None) -> None:
        """Listen to the agent, in a thread that calls `stop` when the rank is asked to stop.

        If the agent is gone or silent, the process exits immediately. Without an agent the rank must be alone in its
        world.
        """
        self.rank, self.agent = rank, agent
        self._stop = stop
        self._calls = 0
        self._results = SimpleQueue[Operation]()
        self._awaited = dict[tuple[str, str], SimpleQueue[Operation]]()  # results by kind and name
        self._tickets = itertools.count()  # of questions about keys
        self._answers = dict[int, SimpleQueue[Any]]()
        self._meetings = SimpleQueue[Meet]()
        if agent is not None:
            threading.Thread(target=self._listen, args=(agent,), daemon=True).start()

    def largest(self, *values: float) -> list[float]:
        """Return the maximum over all ranks of each value, in float64."""
        return self._reduce(MAX, [float(value) for value in values])  # type: ignore[no-any-return]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, without those that are None. Values must be JSON.

        With values that are not None, the number of bytes grows with the number of ranks: it is for checkpoints and
        errors, not for every step.
        """
        found = self._reduce(GATHER, {} if value is None else {str(self.rank): value})
        return [found[rank] for rank in sorted(found, key=int)]

    def collect(self, name: str, value: Any) -> list[Any]:
        """Return the values of all ranks to rank 0, in rank order, which waits for them; to others nothing, at once.

        Any thread may call it, beside the collectives of another one: `name` tells them apart. All ranks use it once.
        Values must be JSON.
        """
        if self.agent is None:
            return [value]
        operation, answer = Operation(name, COLLECT, {str(self.rank): value}), SimpleQueue[Operation]()
        if self.rank == 0:
            self._awaited[COLLECT, name] = answer
        self.agent.send(Reduce(operation))
        if self.rank:
            return []
        found = answer.get().value
        return [found[rank] for rank in sorted(found, key=int)]

    def share(self, name: str, value: Any) -> dict[int, Any]:
        """Return the values of all ranks of this node, by rank; each waits for the others.

        Any thread may call it, beside the collectives of another one: `name` tells them apart. All ranks of the node
        use it once. Values must be JSON.
        """
        if self.agent is None:
            return {self.rank: value}
        operation, answer = Operation(name, SHARE, {str(self.rank): value}), SimpleQueue[Operation]()
        self._awaited[SHARE, name] = answer
        self.agent.send(Reduce(operation))
        return {int(rank): found for rank, found in answer.get().value.items()}

    def check_same(self, digest: str) -> None:
        """Check that all ranks pass the same plan digest, in hexadecimal. Otherwise all raise PlanError."""
        if not self.is_same(digest):
            digests = self.gather(digest)
            odd = next(rank for rank, other in enumerate(digests) if other != digests[0])
            raise PlanError(
                0, f"rank {odd}'s plan differs from rank 0's (digest {digests[odd]}, expected {digests[0]})"
            )

    def is_same(self, digest: str, part: int = 0, parts: int = 1) -> bool:
        """Return whether all ranks pass the same digest, in hexadecimal; with `parts`, all ranks of the same `part`."""
        values = [_NOTHING] * (2 * parts)
        values[2 * part], values[2 * part + 1] = int(digest, 16), -int(digest, 16)
        found = self._reduce(MAX, values)
        pairs = zip(found[::2], found[1::2], strict=True)
        return all(largest == -negative_smallest or largest == _NOTHING for largest, negative_smallest in pairs)

    def meeting(self) -> Meet:
        """Wait for what the agent tells the first rank of each of several nodes. To be called once, by that rank."""
        return self._meetings.get()

    def ask(self, question: str, *arguments: Any) -> Any:
        """Ask about the keys that all ranks share (keys.py), and wait for the answer. Any thread may ask.

        Raises RuntimeError without an agent.
        """
        if self.agent is None:
            raise RuntimeError("a rank without an agent shares no keys")
        ticket, answer = next(self._tickets), SimpleQueue[Any]()
        self._answers[ticket] = answer
        self.agent.send(Ask(ticket, question, arguments))
        return answer.get()

    def _reduce(self, kind: str, value: Any) -> Any:
        """Return the value of all ranks, combined as `reduction.combine` does."""
        self._calls += 1
        result = operation = Operation(str(self._calls), kind, value)
        if self.agent is not None:
            self.agent.send(Reduce(operation))
            result = self._results.get()
        if result.kind != kind or len(result.value) < len(value):
            raise RuntimeError(f"ranks call different collectives: {operation} here, together {result}")
        return result.value

    def _listen(self, agent: Link) -> None:
        clock, poll = AwakeClock(), select.poll()
        poll.register(agent, select.POLLIN)
        heard = math.inf  # when the agent has shown that it is there
        while True:
            if not poll.poll(1e3 * BEAT_S):
                if clock() - heard > SILENCE_S:  # it is stopped, perhaps on a host that the launcher does not reach
                    os._exit(ExitCode.HANG)
                continue
            now = clock()
            try:
                messages = agent.receive()
            except EOFError:
                os._exit(ExitCode.BUG)
            except ProtocolError as error:
                print(f"the agent {error}; {error.problems[0].hint}", file=sys.stderr, flush=True)
                os._exit(error.code)
            for message in messages:
                match message:
                    case Alive():
                        heard = now
                    case Stop():
                        self._stop()
                    case Result(operation) if operation.kind in UNORDERED:
                        if (waits := self._awaited.pop((operation.kind, operation.name), None)) is not None:
                            waits.put(operation)
                    case Result(operation):
                        self._results.put(operation)
                    case Meet():
                        self._meetings.put(message)
                    case Answer(ticket, value):
                        self._answers.pop(ticket).put(value)
