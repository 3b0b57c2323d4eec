r"""Combines values at one node of the tree of agents. Does no I/O: `Branch` (engine/control/branch.py) does.

```
        up: combined values             down: the result
              agent 0                       agent 0
             /       \                     /       \
        agent 1     agent 2           agent 1     agent 2
        / | | \     / | | \           / | | \     / | | \
         ranks       ranks             ranks       ranks
```
Each node sends one message to its parent and one to each member, so what it handles does not grow with the number of
ranks, except that GATHER and COLLECT pass all values on. The result of COLLECT is sent to rank 0 only.
SHARE stays at a node: its ranks get the values of each other.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

Member = TypeVar("Member", bound=Hashable)

FAN_OUT = 16  # child agents of an agent
MAX, GATHER, COLLECT, SHARE = "max", "gather", "collect", "share"
UNORDERED = COLLECT, SHARE  # known by name among those of their kind, so that threads may use them
MIXED = "mixed"  # what comes of different kinds: ranks have called different collectives


class Operation(NamedTuple):
    """A value to combine, or the combined one."""

    name: str  # the same on all ranks, and each rank uses it once
    kind: str
    value: Any


def children(node: int, nodes: int) -> range:
    """Return the child nodes of a node: the tree is filled level by level."""
    return range(FAN_OUT * node + 1, min(FAN_OUT * (node + 1), nodes - 1) + 1)


def combine(one: Operation, other: Operation) -> Operation:
    """Combine two operations of the same name. The order and grouping of several do not matter.

    MAX takes the maxima of two lists of numbers; NaN is larger than any number. The other kinds merge objects, whose
    names are ranks. Operations of different kinds give the list of the kinds.
    """
    if one.kind == other.kind == MAX:
        # The list may be shorter on some ranks, if they have called different collectives: see Control.
        pairs = zip(one.value, other.value, strict=False)
        return Operation(one.name, MAX, [a if a >= b or math.isnan(a) else b for a, b in pairs])
    if one.kind == other.kind and one.kind in (GATHER, *UNORDERED):
        return Operation(one.name, one.kind, one.value | other.value)
    return Operation(one.name, MIXED, sorted({*_kinds(one), *_kinds(other)}))


def _kinds(operation: Operation) -> list[str]:
    """The kinds of the operations that this one was made of."""
    return operation.value if operation.kind == MIXED else [operation.kind]


@dataclass
class _Open(Generic[Member]):
    """An operation that has not been answered yet, and the members that have joined it."""

    combined: Operation
    joined: set[Member]


class Reduction(Generic[Member]):
    """The open operations of a node. Its members are its ranks and its child agents, which are known by number only."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._open = dict[str, _Open[Member]]()

    def add(self, member: Member, operation: Operation) -> Operation | None:
        """Note that a member has joined an operation. Returns it, combined, when all members have joined.

        Raises ValueError if the member has joined it before.
        """
        found = self._open.get(operation.name)
        if found is None:
            found = self._open[operation.name] = _Open(operation, {member})
        elif member in found.joined:
            raise ValueError(f"a member joins {operation.name} twice")
        else:
            found.joined.add(member)
            found.combined = combine(found.combined, operation)
        return found.combined if len(found.joined) == self._members else None

    def answered(self, name: str) -> set[Member]:
        """Forget an operation that has its result, and return the members that wait for it."""
        return self._open.pop(name).joined
