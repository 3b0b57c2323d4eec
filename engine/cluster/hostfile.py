"""DeepSpeed's hostfile format: one host per line with its number of devices, `worker-0 slots=8`; `#` starts a comment.

Clusters of unequal nodes add the speed of a node's devices (percent of full speed) and the memory of each device:
`old-0 slots=8 speed=50% memory=40GiB`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.config.checks import LEAST_MEMORY
from engine.config.mesh_checks import MOST_RANKS
from engine.config.units import parse_count
from engine.errors import ConfigError, Problem
from engine.readers import read_text

_HOST = re.compile(r"(?:\w[\w.-]*@)?\w[\w.:-]*")  # a leading dash would reach ssh as an option
_SLOTS = re.compile(r"slots=([0-9]+)")
_MOST_MEMORY = 2**50  # the limit of cluster.device_memory
_FORM = "write HOST slots=N, for example worker-0 slots=8"
ONCE = "list each host once, with all of its slots"


@dataclass(frozen=True)
class Node:
    """One host. In a cluster of HDP ranks (`Cluster.hdp`), `devices` counts the node's HDP ranks."""

    host: str
    devices: int
    speed: int = 100  # percent of full speed
    memory: int | None = None  # bytes per device; None: cluster.device_memory

    @property
    def address(self) -> str:
        """The host without the user with whom ssh logs in."""
        return self.host.rpartition("@")[2]


def read(path: str) -> tuple[Node, ...]:
    """Read the nodes of a hostfile. Raises ConfigError if it is missing, unreadable, empty or malformed."""
    try:
        text = read_text(Path(path), error=ConfigError)
    except (OSError, ConfigError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it {error}".removeprefix("it cannot be read: ")
        message = f"the hostfile {path} cannot be read: {reason}"
        raise ConfigError(message, key="cluster.hostfile", hint="choose a file with lines `HOST slots=N`") from error
    return parse(text, path)


def parse(text: str, name: str) -> tuple[Node, ...]:
    """Parse the text of a hostfile; nodes keep its order.

    Raises ConfigError with one problem per malformed line, under the key `name:line`.
    """
    nodes: dict[str, Node] = {}
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        key = f"{name}:{number}"
        try:
            node = _parse_line(words, key)
            before = nodes.setdefault(_canonical(node.address), node)
            if before is not node:
                same = "appears twice" if before.host == node.host else f"is also listed, as {before.host}"
                raise ConfigError(f"host {node.host} {same}", key=key, hint=ONCE)
        except ConfigError as error:
            problems += error.problems
    if not nodes and not problems:
        problems.append(Problem("the hostfile lists no hosts", name, _FORM))
    if problems:
        raise ConfigError.of(problems)
    return tuple(nodes.values())


def _canonical(address: str) -> str:
    """Return the one spelling of a host: names ignore case and a last dot, and addresses of IPv6 have several forms."""
    with suppress(ValueError):
        return str(ipaddress.ip_address(address))
    return address.lower().removesuffix(".")


def _parse_line(words: list[str], key: str) -> Node:
    """Parse the words of one line. Raises ConfigError, with `key` as the place, for the first error."""
    host, *rest = words
    if _HOST.fullmatch(host) is None:
        raise ConfigError(f"{host!r} is not a host name", key=key, hint=_FORM)
    if not rest:
        raise ConfigError(f"host {host} has no slots", key=key, hint=_FORM)
    slots = _SLOTS.fullmatch(rest[0])
    if slots is None:
        raise ConfigError(f"host {host}: {rest[0]!r} is not slots=N", key=key, hint=_FORM)
    devices = int(slots[1])
    if devices == 0:
        raise ConfigError(f"host {host} has 0 slots; a host needs at least one", key=key, hint=_FORM)
    if devices > MOST_RANKS:
        message = f"host {host} has {devices:,} slots; at most {MOST_RANKS:,} ranks are supported"
        raise ConfigError(message, key=key, hint=_FORM)
    options: dict[str, int] = {}
    for word in rest[1:]:
        name, _, value = word.partition("=")
        if name not in _OPTIONS:
            hint = "after HOST slots=N only speed and memory are allowed, for example speed=50% memory=40GiB"
            raise ConfigError(f"host {host}: {word!r} is not speed=N% or memory=SIZE", key=key, hint=hint)
        parse_value, meaning, hint = _OPTIONS[name]
        amount = parse_value(value)
        if amount is None:
            raise ConfigError(f"host {host}: {word!r} is not {meaning}", key=key, hint=hint)
        if name in options:
            raise ConfigError(f"host {host}: {name}= is given twice", key=key, hint="remove one of them")
        options[name] = amount
    return Node(host, devices, **options)


def _parse_speed(value: str) -> int | None:
    """Parse a speed such as `50%`; None unless it is from 1% to 100%."""
    match = re.fullmatch(r"([0-9]{1,3})%", value)
    return int(match[1]) if match and 1 <= int(match[1]) <= 100 else None


def _parse_memory(value: str) -> int | None:
    """Parse a size such as `40GiB` into bytes; None unless it is from 1M to 1024T."""
    try:
        amount = parse_count(value, bytes_=True)
    except ValueError:
        return None
    return amount if LEAST_MEMORY <= amount <= _MOST_MEMORY else None


_OPTIONS: dict[str, tuple[Callable[[str], int | None], str, str]] = {  # parser, what it expects, hint
    "speed": (_parse_speed, "a speed from 1% to 100%", "write speed=N%, for example speed=50%"),
    "memory": (_parse_memory, "a memory size from 1M to 1024T", "write memory=SIZE, for example memory=40GiB"),
}
