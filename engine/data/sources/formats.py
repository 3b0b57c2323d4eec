"""The table of document formats. To add one, write a module in this folder and add an entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from engine.config import schema
from engine.data.sources.folder import FolderSource, folder_parts
from engine.data.sources.jsonl import JsonlSource, jsonl_parts
from engine.data.sources.source import Part, Source


class Format(NamedTuple):
    """How to read a format: `source(data)` opens its documents, `parts` splits it to measure lengths in parallel.

    `parts(data, sample, seed)` returns the parts and the fraction of the source that they contain.
    """

    source: Callable[[schema.Data], Source]
    parts: Callable[[schema.Data, int | None, int], tuple[list[Part], float]]


FORMATS: Mapping[str, Format] = {
    "folder": Format(FolderSource, folder_parts),
    "jsonl": Format(JsonlSource, jsonl_parts),
}


def open_source(data: schema.Data) -> Source:
    """Open the documents that a config names. Raises DataError if there are none."""
    return FORMATS[data.format].source(data)
