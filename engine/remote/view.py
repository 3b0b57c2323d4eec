"""Which actor has which role of the data plane, and where every process reads it.

```
 role        planner: lengths -> plans      host-0, host-1, ...: blocks, rank files
 actor       a Ray actor, one process; a standby is an actor without a role
 epoch       a number that a role gets whenever an actor takes it; never used twice
 view        role -> (actor, epoch), with a version
 board       all views of a run; the supervisor publishes them, all others read the newest
```
Each call and each answer names an epoch, so what an actor that was replaced still does has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Protocol

from engine.readers import parse_line

PLANNER = "planner"


def host_role(host: int) -> str:
    """Return the role of the actor that packs, constructs and serves on a host."""
    return f"host-{host}"


def host_of(role: str) -> int | None:
    """Return the host on which the actor of a role must run; None if any will do."""
    return None if role == PLANNER else int(role.removeprefix("host-"))


class Process(NamedTuple):
    """A process of a host. The start time tells it from a later one with the same pid."""

    pid: int
    started: int  # clock ticks since the host started


@dataclass(frozen=True)
class Member:
    """An actor that has a role."""

    actor: str  # its name
    host: int
    process: Process
    epoch: int


@dataclass(frozen=True)
class View:
    """The members of a data plane by role."""

    version: int = 0
    epoch: int = 0  # the last that was given to a role
    members: Mapping[str, Member] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the view as a line."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, line: str | bytes) -> View:
        """Make a view of that line."""
        found = parse_line(line)
        members = {
            role: Member(one["actor"], one["host"], Process(*one["process"]), one["epoch"])
            for role, one in found["members"].items()
        }
        return cls(found["version"], found["epoch"], members)


class Board(Protocol):
    """Where views are published."""

    def newest(self, version: int = 0) -> View | None:
        """Return the newest view if it is newer than `version`."""
        ...

    def publish(self, view: View) -> bool:
        """Publish a view, unless there is one with its version: then another supervisor is at work. Returns whether."""
        ...
