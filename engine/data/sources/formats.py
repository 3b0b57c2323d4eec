"""The table of document formats. To add one, write a module in this folder and add an entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from engine.config import schema
from engine.data.sources.arrow import ArrowBlock, arrow_blocks, arrow_sample
from engine.data.sources.folder import FolderBlock, folder_blocks, folder_sample
from engine.data.sources.jsonl import JsonlBlock, jsonl_blocks, jsonl_sample
from engine.data.sources.parquet import ParquetBlock, parquet_blocks, parquet_sample
from engine.data.sources.source import Block


class Format(NamedTuple):
    """How to read a format: `blocks(data)` splits the documents of a config, to be read in parallel.

    `block` is the class of the blocks, a dataclass of strings, integers and tuples of them (see block_files.py).
    `sample(data, documents, seed)` returns blocks of about so many random documents, and the fraction of the source
    that they contain.
    """

    block: type[Block]
    blocks: Callable[[schema.Data], list[Block]]
    sample: Callable[[schema.Data, int | None, int], tuple[list[Block], float]]


FORMATS: Mapping[str, Format] = {
    "folder": Format(FolderBlock, folder_blocks, folder_sample),
    "jsonl": Format(JsonlBlock, jsonl_blocks, jsonl_sample),
    "parquet": Format(ParquetBlock, parquet_blocks, parquet_sample),
    "arrow": Format(ArrowBlock, arrow_blocks, arrow_sample),
}
