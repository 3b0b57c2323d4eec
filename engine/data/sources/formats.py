"""The table of document formats. To add one, write a module in this folder and add an entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from engine.config import schema
from engine.data.sources.arrow import arrow_blocks, arrow_sample
from engine.data.sources.folder import folder_blocks, folder_sample
from engine.data.sources.jsonl import jsonl_blocks, jsonl_sample
from engine.data.sources.parquet import parquet_blocks, parquet_sample
from engine.data.sources.source import Block


class Format(NamedTuple):
    """How to read a format: `blocks(data)` splits the documents of a config, to be read in parallel.

    `sample(data, documents, seed)` returns blocks of about so many random documents, and the fraction of the source
    that they contain.
    """

    blocks: Callable[[schema.Data], list[Block]]
    sample: Callable[[schema.Data, int | None, int], tuple[list[Block], float]]


FORMATS: Mapping[str, Format] = {
    "folder": Format(folder_blocks, folder_sample),
    "jsonl": Format(jsonl_blocks, jsonl_sample),
    "parquet": Format(parquet_blocks, parquet_sample),
    "arrow": Format(arrow_blocks, arrow_sample),
}
