"""The table of document formats. To add one, write a module in this folder and add an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.config import schema
from engine.data.sources.arrow import ArrowBlock, arrow_blocks, arrow_files, arrow_sample
from engine.data.sources.content import is_json, is_named, is_only_recognised
from engine.data.sources.files import find
from engine.data.sources.folder import FolderBlock, folder_blocks, folder_sample
from engine.data.sources.jsonl import JsonlBlock, jsonl_blocks, jsonl_sample
from engine.data.sources.parquet import ParquetBlock, parquet_blocks, parquet_sample
from engine.data.sources.source import Block
from engine.tables import Table


@dataclass(frozen=True)
class Format:
    """A format of documents, and what others need to know of it.

    block: the class of the blocks, a dataclass of strings, integers and tuples of them (see block_files.py), which says
        what of it names its tokens in the cache, and how its places are named for people (source.py).
    blocks: splits the documents of a config, to be read in parallel.
    sample: `sample(data, documents, seed)` returns blocks of about so many random documents, and the fraction of the
        source that they contain.
    pattern: the glob of a folder's files, unless a config sets data.pattern.
    words: what the files contain, for messages.
    inside: a regular expression of what follows the path in a place of a document; empty if each file is a document.
    unpacked: files may be compressed, and the blocks decompress them (compressed.py).
    suffixes: names of files in this format, without the suffix of a compression, where `data.path` alone is given
        (choose.py). At a URL they decide.
    begins: `begins(head, path, named)` says there whether a file is in this format, by its first, decompressed bytes
        `head` and by whether it is `named` with one of the suffixes. It is asked if the bytes are not those of another
        format that `recognise` knows (content.py). By default the name decides.
    files: lists the files of a config.
    unsized: `blocks` without opening files, so that `data lint` reports unreadable files together with other faults.
    """

    block: type[Block]
    blocks: Callable[[schema.Data], list[Block]]
    sample: Callable[[schema.Data, int | None, int], tuple[list[Block], float]]
    pattern: str
    words: str
    inside: str
    unpacked: bool = False
    suffixes: tuple[str, ...] = ()
    begins: Callable[[bytes, str, bool], bool] = is_named
    files: Callable[[schema.Data], list[str]] = find
    unsized: Callable[[schema.Data], list[Block]] | None = None


FORMATS: Table[Format] = Table(
    Format,
    {
        "folder": Format(
            FolderBlock,
            folder_blocks,
            folder_sample,
            pattern="**/*",
            words="text",
            inside=r"\d+",
            unpacked=True,
            unsized=partial(folder_blocks, sized=False),
        ),
        "jsonl": Format(
            JsonlBlock,
            jsonl_blocks,
            jsonl_sample,
            pattern="**/*.jsonl*",
            words="JSON lines",
            inside=r"\d+|byte \d+",
            unpacked=True,
            suffixes=(".jsonl", ".ndjson"),
            begins=is_json,
        ),
        "parquet": Format(
            ParquetBlock,
            parquet_blocks,
            parquet_sample,
            pattern="**/*.parquet",
            words="Parquet",
            inside=r"row \d+",
            suffixes=(".parquet",),
            begins=is_only_recognised,
        ),
        "arrow": Format(
            ArrowBlock,
            arrow_blocks,
            arrow_sample,
            pattern="**/*.arrow",
            words="Arrow",
            inside=r"batch \d+:row \d+",
            suffixes=(".arrow",),
            begins=is_only_recognised,
            files=arrow_files,
        ),
    },
)
