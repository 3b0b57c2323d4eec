"""Measures the lengths of all documents of a source, or of a sample, in several processes.

Training needs an index of every document, in order, with hashes (index.py). Statistics need only lengths, in any order,
and a sample is enough.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from operator import methodcaller

import numpy as np

from engine.config import schema
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Part
from engine.errors import DataError
from engine.safe_path import safe_path
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

    Without `sample`, a folder of up to 100,000 files or a JSONL file of up to 1 GiB is read completely, and a random
    sample of this size from a larger one. (Of 100,000 documents, 100 are longer than the 99.9th percentile.) `progress`
    is called after each part. Raises DataError for an invalid document, or if all documents are empty.
    """
    parts, fraction = FORMATS[data.format].parts(data, sample, seed)
    sizes: list[int] = []
    for done, found in enumerate(_sizes(parts), start=1):
        sizes += found
        progress(done / len(parts))
    inputs = np.array(sizes, dtype=np.int64) + 1  # BOS is an input, as in index.py
    if not (inputs > 1).any():
        message = f"every document ({len(sizes):,}) is empty" if sizes else "contains no documents"
        raise DataError(message, key=data.path, hint="set data.path to documents with text")
    return Documents(inputs[inputs > 1], int((inputs == 1).sum()), fraction)


def _sizes(parts: Sequence[Part]) -> Iterator[list[int]]:
    """Yield the document sizes in bytes of each part, in order, measured by one process per core."""
    # Starting processes takes seconds, so a single part is read in this process.
    workers = min(len(parts), os.cpu_count() or 1)
    if workers < 2:
        yield from (part.sizes() for part in parts)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of numpy
    os.environ.update(safe_path())  # workers inherit the environment; the pool has no argument for it
    try:
        with ProcessPoolExecutor(workers, context, initializer=_ignore_interrupts) as pool:
            yield from pool.map(methodcaller("sizes"), parts)  # not a lambda, which cannot be pickled
    except BrokenProcessPool as error:
        message = "a process that read documents was killed, possibly by the out-of-memory killer"
        raise DataError(message, hint="read fewer documents with --sample, or close other programs") from error


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent process, which then terminates its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
