"""Measures the lengths of all documents of a source, or of a sample, in several processes.

Training needs an index of every document, in order, with hashes (index.py). Statistics need only lengths, in any order,
and a sample is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from engine.config import schema
from engine.data.pack import Tokens
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Block, Document
from engine.data.token_file import TokenFile
from engine.data.workers import cores, in_processes
from engine.errors import DataError
from engine.units import Ints

Progress = Callable[[float], None]  # gets the fraction of the work that is done, 0 to 1


@dataclass(frozen=True, eq=False)
class Documents:
    """Lengths of non-empty documents, in inputs. `empty` counts the empty ones. Both cover `fraction` of the source."""

    lengths: Ints  # [N]
    empty: int = 0
    fraction: float = 1.0


def scan(data: schema.Data, sample: int | None, seed: int, progress: Progress = lambda done: None) -> Documents:
    """Measure the documents of a source, or about `sample` of them, chosen at random with `seed`.

    Without `sample`, a folder of up to 100,000 files, or other files of up to 1 GiB, are read completely, and a random
    sample of this size from a larger one. (Of 100,000 documents, 100 are longer than the 99.9th percentile.) `progress`
    is called after each block. Raises DataError for an invalid document, or if all documents are empty.
    """
    if data.format == "tokens":
        tokens = TokenFile.open(Path(data.path))
        stored = np.diff(tokens.bounds(0, len(tokens))) - 1
        return Documents(stored[stored > 0], int((stored < 1).sum()))
    blocks, fraction = FORMATS[data.format].sample(data, sample, seed)
    inputs: list[int] = []
    hint = "read fewer documents with --sample, or close other programs"
    for done, found in enumerate(in_processes(partial(_inputs, Tokens.of(data)), blocks, cores(), hint), start=1):
        inputs += found
        progress(done / len(blocks))
    lengths = np.array(inputs, dtype=np.int64)
    if not lengths.any():
        message = f"every document ({len(lengths):,}) is empty" if inputs else "contains no documents"
        raise DataError(message, key=data.path, hint="set data.path to documents with text")
    return Documents(lengths[lengths > 0], int((lengths == 0).sum()), fraction)


def _inputs(tokens: Tokens, block: Block) -> list[int]:
    """Return the length of each document of a block in inputs, 0 for an empty one."""
    tokenizer = tokens.open()

    def inputs(document: Document) -> int:
        if document.text is None:
            return max(0, len(document.ids) - 1) if document.ids is not None else 0  # the last id is only a label
        if tokenizer.kind == "bytes":
            return len(document.text) + 1 if document.text else 0
        return len(tokenizer.document(document.text)) - 1 if document.text else 0

    return [inputs(document) for document in block.documents()]
