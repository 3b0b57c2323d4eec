"""The interfaces that every document format implements: `Source` reads documents, `Part` measures many of them."""

from __future__ import annotations

from typing import Protocol

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


class Part(Protocol):
    """A part of a source that a worker process measures. It is pickled, so it must not contain an open file."""

    def sizes(self) -> list[int]:
        """Return the length in bytes of each document, 0 for an empty one. Raises DataError as `Source.read` does."""
        ...


def choose(total: int, count: int, seed: int) -> Ints:
    """Draw `count` distinct numbers uniformly from 0 .. total - 1: int64 [count], ascending."""
    return np.sort(Generator(Philox(key=seed)).choice(total, count, replace=False)).astype(np.int64)
