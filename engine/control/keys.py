"""The keys through which the process groups of PyTorch find their members, kept by the root of the tree of agents.

Does no I/O: `Branch` (engine/control/branch.py) does. PyTorch's own store would listen on every interface of the first
host, for anyone; these keys travel over the authenticated links of the agents. engine/parallel/store.py is the end of
a rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Member = TypeVar("Member", bound=Hashable)


@dataclass
class _Wait(Generic[Member]):
    """A `get` that waits for keys that are not set yet."""

    member: Member
    ticket: int
    keys: Sequence[str]
    missing: set[str]


class Keys(Generic[Member]):
    """Values by key; both are text. A member asks with a ticket, a number that comes back with the answer.

    | question | arguments | answer |
    |---|---|---|
    | `set` | key, value | None |
    | `get` | keys | their values, when all are set |
    | `check` | keys | whether all are set |
    | `add` | key, number | the sum of all numbers that were added |
    | `swap` | key, expected, value | the value afterwards: the new one if the key had the expected one, or none and
    none (an empty text) was expected; without the key, else what was expected |
    | `delete` | key | whether it was set |
    """

    def __init__(self) -> None:
        self._values = dict[str, str]()
        self._waits = defaultdict[str, list[_Wait[Member]]](list)  # by each key that is missing

    def ask(self, member: Member, ticket: int, question: str, *arguments: Any) -> Iterator[tuple[Member, int, Any]]:
        """Yield the answers that are known now: (member, ticket, answer). They may be those of earlier questions."""
        if question in ("get", "check"):
            (keys,) = arguments
            missing = {key for key in keys if key not in self._values}
            if question == "check":
                yield member, ticket, not missing
            elif not missing:
                yield member, ticket, [self._values[key] for key in keys]
            else:
                # The answer comes from the question that sets the last of the missing keys.
                wait = _Wait(member, ticket, keys, missing)
                for key in missing:
                    self._waits[key].append(wait)
            return
        key, *values = arguments
        if question == "delete":
            yield member, ticket, self._values.pop(key, None) is not None
            return
        before, answer = self._values.get(key), None
        if question == "add":
            answer = int(before or 0) + int(values[0])
            self._values[key] = str(answer)
        elif question == "swap":
            # As `compare_set` of PyTorch's stores: an empty `expected` also matches a key that is not set.
            expected, value = values
            if before == expected or (before is None and not expected):
                self._values[key] = value
            answer = self._values.get(key, expected)
        else:
            (self._values[key],) = values
        yield member, ticket, answer
        if key in self._values:
            for wait in self._waits.pop(key, ()):
                wait.missing.discard(key)
                if not wait.missing:
                    yield wait.member, wait.ticket, [self._values.get(one, "") for one in wait.keys]
