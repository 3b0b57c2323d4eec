"""DeepSpeed's hostfile: one host a line with its number of ranks, `worker-0 slots=8`; `#` starts a comment.

Of a mixed cluster a line may say more, each rank's share of full speed and its memory:
`old-0 slots=8 speed=50% memory=40GiB`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.config.units import parse_count
from engine.errors import ConfigError, Problem

_HOST = re.compile(r"\w[\w.:@-]*")  # a leading dash would reach ssh as an option
_SLOTS = re.compile(r"slots=([0-9]+)")
_SPEED = re.compile(r"speed=([0-9]+)%")
_FORM = "write HOST slots=N, for example worker-0 slots=8"


@dataclass(frozen=True)
class Node:
    """One host and the number of ranks that it runs; their speed in percent, their memory in bytes if it is special."""

    host: str
    slots: int
    speed: int = 100
    memory: int | None = None


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
            nodes[words[0]] = _node(words)
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
    slots = _SLOTS.fullmatch(words[1])
    if slots is None:
        return f"host {host}: {words[1]!r} is not slots=N"
    if int(slots[1]) == 0:
        return f"host {host} has 0 slots; a host runs at least one rank"
    wrong = next((word for word in words[2:] if not _is_extra(word)), None)
    if wrong is not None:
        return f"host {host}: {wrong!r} is not speed=N% (1 to 100) or memory=SIZE"
    keys = [word.split("=")[0] for word in words[2:]]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    return None if twice is None else f"host {host}: {twice}= is given twice"


def _is_extra(word: str) -> bool:
    speed = _SPEED.fullmatch(word)
    if speed is not None:
        return 1 <= int(speed[1]) <= 100
    try:
        return word.startswith("memory=") and parse_count(word.removeprefix("memory="), bytes_=True) > 0
    except ValueError:
        return False


def _node(words: list[str]) -> Node:
    """Return the node of a line without mistakes."""
    values = dict(word.split("=", 1) for word in words[1:])
    memory = parse_count(values["memory"], bytes_=True) if "memory" in values else None
    return Node(words[0], int(values["slots"]), int(values.get("speed", "100%").rstrip("%")), memory)
