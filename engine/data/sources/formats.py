"""The table of document formats. To add one, write a module in this folder and add an entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from engine.config import schema
from engine.data.sources.arrow import arrow_blocks, arrow_sample
from engine.data.sources.folder import FolderSource, folder_blocks, folder_sample
from engine.data.sources.jsonl import JsonlSource, jsonl_blocks, jsonl_sample
from engine.data.sources.parquet import parquet_blocks, parquet_sample
from engine.data.sources.source import Block, Source
from engine.errors import DataError


class Format(NamedTuple):
    """How to read a format: `source(data)` opens its documents, `blocks(data)` splits them to be read in parallel.

    `sample(data, documents, seed)` returns blocks of about so many random documents, and the fraction of the source
    that they contain.
    """

    source: Callable[[schema.Data], Source] | None  # None: training reads a token file of the documents instead
    blocks: Callable[[schema.Data], list[Block]]
    sample: Callable[[schema.Data, int | None, int], tuple[list[Block], float]]


FORMATS: Mapping[str, Format] = {
    "folder": Format(FolderSource, folder_blocks, folder_sample),
    "jsonl": Format(JsonlSource, jsonl_blocks, jsonl_sample),
    "parquet": Format(None, parquet_blocks, parquet_sample),
    "arrow": Format(None, arrow_blocks, arrow_sample),
}


def open_source(data: schema.Data) -> Source:
    """Open the documents that a config names. Raises DataError if there are none, or if they must be packed before."""
    source = FORMATS[data.format].source
    if source is None:
        message, hint = f"the format {data.format} cannot be trained on directly", "run `bytescale data pack` first"
        raise DataError(message, key=data.path, hint=hint)
    return source(data)
