"""DeepSpeed's hostfile: one host a line with its number of ranks, `worker-0 slots=8`; `#` starts a comment.

Of a mixed cluster a line may say more, each rank's share of full speed and its memory:
`old-0 slots=8 speed=50% memory=40GiB`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.config.checks import MOST_RANKS
from engine.config.units import parse_count
from engine.errors import ConfigError, Problem

_HOST = re.compile(r"\w[\w.:@-]*")  # a leading dash would reach ssh as an option
_SLOTS = re.compile(r"slots=([0-9]+)")
_SPEED = re.compile(r"speed=([0-9]+)%")
_MOST_MEMORY = 2**50  # as of cluster.device_memory
_FORM = "write HOST slots=N, for example worker-0 slots=8"
_EXTRAS = {
    "speed": ("a speed from 1% to 100%", "write speed=N%, for example speed=50%"),
    "memory": ("a memory of 1 byte to 1024T", "write memory=SIZE, for example memory=40GiB"),
}
_NO_EXTRA = ("speed=N% or memory=SIZE", "behind HOST slots=N write what is special, for example speed=50% memory=40GiB")


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
        found = _problem(words, nodes) if words else None
        if found is not None:
            message, hint = found
            problems.append(Problem(message, f"{name}:{number}", hint))
        elif words:
            nodes[words[0]] = _node(words)
    if not nodes and not problems:
        problems.append(Problem("the hostfile names no host", name, _FORM))
    if problems:
        raise ConfigError.of(problems)
    return tuple(nodes.values())


def _problem(words: list[str], seen: dict[str, Node]) -> tuple[str, str] | None:
    """Return what is wrong with the words of one line and how it is written, or None."""
    host, *rest = words
    if _HOST.fullmatch(host) is None:
        return f"{host!r} is not a host name", _FORM
    if host in seen:
        return f"host {host} is named twice", "give all its ranks in one line"
    if not rest:
        return f"host {host} has no slots", _FORM
    wrong = _slots_problem(host, rest[0])
    if wrong is not None:
        return wrong, _FORM
    for word in rest[1:]:
        what, form = _EXTRAS.get(word.split("=")[0], _NO_EXTRA)
        if not _is_extra(word):
            return f"host {host}: {word!r} is not {what}", form
    keys = [word.split("=")[0] for word in rest[1:]]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    return None if twice is None else (f"host {host}: {twice}= is given twice", "leave one of the two out")


def _slots_problem(host: str, word: str) -> str | None:
    slots = _SLOTS.fullmatch(word)
    if slots is None:
        return f"host {host}: {word!r} is not slots=N"
    ranks = int(slots[1])
    if ranks == 0:
        return f"host {host} has 0 slots; a host runs at least one rank"
    return f"host {host} has {ranks:,} slots; at most {MOST_RANKS:,} ranks are planned" if ranks > MOST_RANKS else None


def _is_extra(word: str) -> bool:
    speed = _SPEED.fullmatch(word)
    if speed is not None:
        return 1 <= int(speed[1]) <= 100
    name, _, value = word.partition("=")
    try:
        return name == "memory" and 1 <= parse_count(value, bytes_=True) <= _MOST_MEMORY
    except ValueError:
        return False


def _node(words: list[str]) -> Node:
    """Return the node of a line without mistakes."""
    values = dict(word.split("=", 1) for word in words[1:])
    memory = parse_count(values["memory"], bytes_=True) if "memory" in values else None
    return Node(words[0], int(values["slots"]), int(values.get("speed", "100%").rstrip("%")), memory)
