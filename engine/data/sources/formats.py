"""The table of document formats. To add one, write a module in this folder and add an entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from engine.config import schema
from engine.data.sources.folder import FolderSource, folder_blocks, folder_sample
from engine.data.sources.jsonl import JsonlSource, jsonl_blocks, jsonl_sample
from engine.data.sources.source import Block, Source


class Format(NamedTuple):
    """How to read a format: `source(data)` opens its documents, `blocks(data)` splits them to be read in parallel.

    `sample(data, documents, seed)` returns blocks of about so many random documents, and the fraction of the source
    that they contain.
    """

    source: Callable[[schema.Data], Source]
    blocks: Callable[[schema.Data], list[Block]]
    sample: Callable[[schema.Data, int | None, int], tuple[list[Block], float]]


FORMATS: Mapping[str, Format] = {
    "folder": Format(FolderSource, folder_blocks, folder_sample),
    "jsonl": Format(JsonlSource, jsonl_blocks, jsonl_sample),
}


def open_source(data: schema.Data) -> Source:
    """Open the documents that a config names. Raises DataError if there are none."""
    return FORMATS[data.format].source(data)
