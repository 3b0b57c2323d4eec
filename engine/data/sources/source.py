"""The interfaces of document formats: `Source` finds single documents, a `Block` reads many in a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.random import Generator, Philox

from engine.units import Ints


class Source(Protocol):
    """Named documents, in the same order on every machine. `document` is an index into `names`.

    Every method raises DataError if a document cannot be read.
    """

    names: tuple[str, ...]
    blank: int  # number of blank lines in a JSONL file, which are not documents

    def place(self, document: int) -> str:
        """Return the location of a document for messages: a path, or `file:line`."""
        ...

    def read(self, document: int) -> bytes:
        """Return the validated text of a document, in bytes without BOS and EOS."""
        ...

    def read_span(self, document: int, start: int, stop: int) -> bytes:
        """Return bytes start .. stop - 1 of a document's text; fewer if the text is shorter."""
        ...


class Document(NamedTuple):
    """A document, as a block reads it."""

    place: str  # for messages: a path, or `path:byte OFFSET` of a line
    text: bytes  # validated, without BOS and EOS; empty for an empty file or a blank line


class Block(Protocol):
    """Documents that are read together, by one process. It is pickled, so it must not contain an open file.

    Its `repr` says what is read and how, so that it can be recognised later.
    """

    @property
    def files(self) -> list[Path]:
        """The files that the documents are read from."""
        ...

    def documents(self) -> Iterator[Document]:
        """Read the documents in order. Raises DataError as `Source.read` does."""
        ...


def choose(total: int, count: int, seed: int) -> Ints:
    """Draw `count` distinct numbers uniformly from 0 .. total - 1: int64 [count], ascending."""
    return np.sort(Generator(Philox(key=seed)).choice(total, count, replace=False)).astype(np.int64)
