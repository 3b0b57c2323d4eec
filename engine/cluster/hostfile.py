"""DeepSpeed's hostfile: one host a line with its number of ranks, `worker-0 slots=8`; `#` starts a comment."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.errors import ConfigError, Problem

_HOST = re.compile(r"\w[\w.:@-]*")  # a leading dash would reach ssh as an option
_SLOTS = re.compile(r"slots=([0-9]+)")
_FORM = "write HOST slots=N, for example worker-0 slots=8"


@dataclass(frozen=True)
class Node:
    """One host and the number of ranks that it runs."""

    host: str
    slots: int


def parse(text: str, name: str) -> tuple[Node, ...]:
    """Return the nodes of a hostfile's text, in its order; `name` is the file's, for messages.

    Raises ConfigError with every bad line, each under the key `name:line`.
    """
    nodes: dict[str, Node] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        problem = _problem(words, nodes) if words else None
        if problem is not None:
            problems.append(Problem(problem, f"{name}:{number}", _FORM))
        elif words:
            nodes[words[0]] = Node(words[0], int(words[1].removeprefix("slots=")))
    if not nodes and not problems:
        problems.append(Problem("the hostfile names no host", name, _FORM))
    if problems:
        raise ConfigError.of(problems)
    return tuple(nodes.values())


def _problem(words: list[str], seen: dict[str, Node]) -> str | None:
    """Return what is wrong with the words of one line, or None."""
    host = words[0]
    if _HOST.fullmatch(host) is None:
        return f"{host!r} is not a host name"
    if host in seen:
        return f"host {host} is named twice"
    if len(words) == 1:
        return f"host {host} has no slots"
    if len(words) > 2:
        return f"host {host} is followed by more than its slots: {' '.join(words[2:])}"
    slots = _SLOTS.fullmatch(words[1])
    if slots is None:
        return f"host {host}: {words[1]!r} is not slots=N"
    return None if int(slots[1]) > 0 else f"host {host} has 0 slots; a host runs at least one rank"
