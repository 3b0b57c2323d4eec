"""Tables of what can be chosen by name, such as planners: an entry is an object that states its own traits.

So what others need to know of an entry is beside it, and a new one is a change in one place. A table is imported
whenever a config is checked, so entries name what is slow to import by its path: see `lazy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

Entry = TypeVar("Entry")


class Table(dict[str, Entry]):
    """Entries of one class by their names, in the order in which help lists them."""

    def __init__(self, kind: type[Entry], entries: Mapping[str, Entry]) -> None:
        super().__init__()
        self.kind = kind
        for name, entry in entries.items():
            self[name] = entry

    def __setitem__(self, name: str, entry: Entry) -> None:
        """Raise TypeError for an entry without the traits of this table."""
        if not isinstance(entry, self.kind):
            traits = ", ".join(self.kind.__annotations__)
            given = getattr(entry, "__name__", type(entry).__name__)
            raise TypeError(f"the entry {name!r} is {given}, not a {self.kind.__name__} with {traits}")
        super().__setitem__(name, entry)


def imported(path: str) -> Any:
    """Import what `path` names: `package.module:name`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def lazy(path: str) -> Callable[..., Any]:
    """Return a function that calls the one at `path`, `package.module:name`, and imports it at the first call."""

    def call(*args: Any, **named: Any) -> Any:
        return imported(path)(*args, **named)

    return call
