"""One planning process for all ranks of a node: the first rank queries it, and forwards each answer to the others.

The agent of the node has given the ranks the sockets between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from engine.data.runtime.process import Answers, PlanningProcess


class NodeAnswers:
    """The answers of the planning process of a node, at one of its ranks.

    All ranks of a node must call the same methods in the same order.
    """

    def __init__(self, make: Callable[[], Answers], sockets: Sequence[int], first: bool) -> None:
        """Take the NODE_SOCKETS of this rank. The `first` rank starts the process, with `make` as PlanningProcess."""
        self._ranks = [Connection(descriptor) for descriptor in sockets]
        self.process = PlanningProcess(make) if first else None

    def ask(self, question: Callable[..., Any], *arguments: Any) -> None:
        """Ask as `PlanningProcess.ask`. Of the ranks, the first does."""
        if self.process is not None:
            self.process.ask(question, *arguments)

    def answer(self) -> Any:
        """Wait for the answer to the last `ask`. Raises the error of its work, and those of `PlanningProcess.answer`.

        Raises ConnectionError if another rank of the node has ended.
        """
        if self.process is not None:
            done, found = answer = self.process.answer()
            for other in self._ranks:
                other.send(answer)
        else:
            (first,) = self._ranks
            try:
                done, found = first.recv()
            except EOFError:
                raise ConnectionError("the first rank of this node, which plans for it, has ended") from None
        if not done:
            raise found
        return found

    def close(self) -> None:
        """End the planning process, if this rank has started it."""
        for other in self._ranks:
            other.close()
        if self.process is not None:
            self.process.close()
