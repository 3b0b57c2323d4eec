"""Where documents come from: one small interface, and the table of what implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from engine.config import schema
from engine.data.folder import FolderSource
from engine.data.jsonl import JsonlSource


class Source(Protocol):
    """Documents with names, in an order that is the same on every machine. Every method raises DataError."""

    names: tuple[str, ...]
    blank: int  # lines of a JSONL file without a document

    def place(self, document: int) -> str:
        """Return where a document stands (a path, or `file:line`), for messages."""
        ...

    def read(self, document: int) -> bytes:
        """Return a document's text, checked."""
        ...

    def read_span(self, document: int, start: int, stop: int) -> bytes:
        """Return bytes start..stop of a document's text; fewer if the text ends before."""
        ...


_SOURCES: Mapping[str, Callable[[schema.Data], Source]] = {"folder": FolderSource, "jsonl": JsonlSource}


def open_source(data: schema.Data) -> Source:
    """Return the documents that a config names. Raises DataError when there are none."""
    return _SOURCES[data.format](data)
