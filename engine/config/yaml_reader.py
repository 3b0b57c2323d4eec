"""Reads YAML of limited depth and size, with the line and the text of each key for messages.

PyYAML calls itself for each level, and a few lines of aliases can mean 10^9 values. Both are limited before anything is
made of the text. Values are those of YAML 1.1, in which `yes` is true.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from engine.errors import BytescaleError, ConfigError
from engine.readers import DEEPEST, SMALL, Refusal, wrong_number

MOST_BYTES = SMALL
_MOST = 100_000  # values in a text, aliases expanded
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # in no name of a file
_WRITE = "write KEY: VALUE"


class _Loader(yaml.SafeLoader):
    """Rejects values that are too deep or too large, with their aliases expanded."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = 0
        self._sizes = dict[int, tuple[int, int]]()  # values and levels of each complete node, by its id

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark, is_alias = self.peek_event().start_mark, self.check_event(yaml.AliasEvent)  # type: ignore[no-untyped-call]
        self._level += 1
        if self._level > DEEPEST:
            raise _mistake(f"values are more than {DEEPEST} deep", mark)
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and _NO_TEXT.search(node.value):
            raise _mistake("a text contains a NUL or an unpaired surrogate", mark)
        self._level -= 1
        if not is_alias:
            found = [self._sizes[id(one)] for one in _inside(node)]
            self._sizes[id(node)] = 1 + sum(size for size, _ in found), 1 + max((deep for _, deep in found), default=0)
        elif id(node) not in self._sizes:
            raise _mistake("an alias contains itself", mark)
        size, depth = self._sizes[id(node)]
        if size > _MOST:
            raise _mistake(f"more than {_MOST:,} values, aliases expanded", mark)
        if self._level + depth > DEEPEST:
            raise _mistake(f"values are more than {DEEPEST} deep, aliases expanded", mark)
        return node


def _mistake(what: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.composer.ComposerError(problem=what, problem_mark=mark)


def _inside(node: yaml.Node | None) -> Iterator[yaml.Node]:
    """Yield the keys, values or items of a node."""
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def compose(text: str, place: str, error: Refusal = ConfigError, hint: str = _WRITE) -> yaml.Node | None:
    """Return the root of a text, None if it is empty. Raises `error` with `place` and the line if it is not valid."""
    with refusing(None, place, error, hint):
        return yaml.compose(text, Loader=_Loader)


def parse(text: str, place: str, error: Refusal = ConfigError, hint: str = _WRITE) -> Any:
    """Return the values of a text. Raises `error` as `compose`."""
    node = compose(text, place, error, hint)
    with refusing(node, place, error, hint):
        return checked(_Loader(text).get_single_data())


def checked(values: Any) -> Any:
    """Return values. Raises ValueError if one is a whole number that no float has: nothing could print it."""
    if (name := wrong_number(values, (int,))) is not None:
        raise ValueError(f"{name} is a number with too many digits")
    return values


@contextmanager
def refusing(node: yaml.Node | None, place: str, error: Refusal = ConfigError, hint: str = _WRITE) -> Iterator[None]:
    """Turn what the libraries raise into `error`; with `node`, that includes what the makers of its values raise."""
    try:
        yield
    except BytescaleError:
        raise
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark or wrong.context_mark
        at = f"{place}:{mark.line + 1}" if mark else place
        _, twice, name = str(wrong.problem).partition("found duplicate key ")
        way = f"remove one of the two places that set {name}" if twice else hint
        raise error(f"is not valid YAML: {wrong.problem}", key=at, hint=way) from wrong
    except yaml.YAMLError as wrong:
        message = f"is not valid YAML: {str(wrong).splitlines()[0]}"
        raise error(message, key=place, hint=hint) from wrong
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError, ArithmeticError) as wrong:
        # PyYAML makes numbers and dates without a check: of `!!int x`, of 0b_, of 5,000 digits.
        bad = next((one for one in _scalars(node) if not _can_be_made(one)), None)
        at = place if bad is None else f"{place}:{bad.start_mark.line + 1}"
        said = f"{bad.value[:60]!r} cannot be read as {bad.tag.rpartition(':')[2]}" if bad else str(wrong)[:200]
        raise error(f"is not valid YAML: {said}", key=at, hint=hint) from wrong


def _scalars(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        yield node
    for one in _inside(node):
        yield from _scalars(one)


def _can_be_made(node: yaml.ScalarNode) -> bool:
    try:
        checked(_Loader("").construct_object(node))
    except Exception:  # whatever the library raises: it is what is looked for
        return False
    return True


def lines_of(node: yaml.Node | None) -> dict[str, int]:
    """Return the line, from 1, of each dotted key and of each item of a list: {"run": 3, "run.steps": 4, ...}."""
    return {key: line for key, line, _ in _named(node)}


def texts_of(node: yaml.Node | None) -> dict[str, str]:
    """Return the text of each value that is not a section or a list: {"run.steps": "1e3", ...}."""
    return {key: inner.value for key, _, inner in _named(node) if isinstance(inner, yaml.ScalarNode)}


def _named(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield each dotted key, and each number of an item of a list, with its line and the node of its value."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield f"{prefix}{key.value}", key.start_mark.line + 1, value
            yield from _named(value, f"{prefix}{key.value}.")
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield f"{prefix}{number}", item.start_mark.line + 1, item
