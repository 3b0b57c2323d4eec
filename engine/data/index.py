"""The index of a corpus: lengths, validation split and fingerprint of its documents, built before training starts.

Letters: N non-empty documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.config import schema
from engine.data.bigrams import BigramCounts
from engine.data.sources.formats import open_source
from engine.errors import DataError
from engine.units import Ints

_HASH_BYTES = 16


@dataclass(frozen=True, eq=False)
class Index:
    """The non-empty documents of a source, in its order.

    A document of n bytes has n + 1 inputs: BOS is an input, EOS is only a label.
    """

    names: tuple[str, ...]  # [N] relative paths, or `file:line`
    lengths: Ints  # [N] numbers of inputs
    validation: NDArray[np.bool_]  # [N] True for validation, False for training
    fingerprint: str  # hash of all names, lengths and contents
    empty: int  # number of empty documents and blank lines, which are skipped
    bigram_nats: float | None  # bigram entropy of the training documents (bigrams.py); None unless tokens are bytes

    @cached_property
    def training(self) -> Ints:
        """The indices of the training documents, int64, ascending."""
        return np.flatnonzero(~self.validation).astype(np.int64)

    def save(self, path: Path) -> None:
        """Write the index to a file, which the ranks load."""
        names = "\0".join(self.names).encode("utf-8", "surrogateescape")
        with path.open("wb") as file:
            np.savez(
                file,
                names=np.frombuffer(names, dtype=np.uint8),
                lengths=self.lengths,
                validation=self.validation,
                fingerprint=np.array(self.fingerprint),
                empty=np.array(self.empty),
                bigram_nats=np.array(math.nan if self.bigram_nats is None else self.bigram_nats),
            )

    @classmethod
    def load(cls, path: Path) -> Index:
        """Load an index written by `save`."""
        with np.load(path) as arrays:
            names = arrays["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")
            bigram_nats = float(arrays["bigram_nats"])
            return cls(
                names=tuple(names),
                lengths=arrays["lengths"],
                validation=arrays["validation"],
                fingerprint=str(arrays["fingerprint"]),
                empty=int(arrays["empty"]),
                bigram_nats=None if math.isnan(bigram_nats) else bigram_nats,
            )


def build_index(data: schema.Data, progress: Callable[[int, int], None] | None = None) -> Index:
    """Read every document once and build the index. `progress(done, total)` is called after each document.

    Raises DataError for an invalid document, if all documents are empty, or if all are used for validation.
    """
    source = open_source(data)
    names, lengths, validation = [], [], []
    fingerprint = blake2b(digest_size=_HASH_BYTES)
    bigrams = BigramCounts() if data.tokenizer == "bytes" else None
    for document, name in enumerate(source.names):
        text = source.read(document)
        if text:
            content = blake2b(text, digest_size=_HASH_BYTES).digest()
            # Entries are unambiguous: a name ends with a NUL byte, and length and hash have a fixed width.
            entry = name.encode("utf-8", "surrogateescape") + b"\0" + len(text).to_bytes(8, "little") + content
            fingerprint.update(entry)
            names.append(name)
            lengths.append(len(text) + 1)
            # Decided by the hash of the content, so that no document is in both sets.
            validation.append(int.from_bytes(content[:8], "little") < data.validation_share * 2**64)
            if bigrams and not validation[-1]:
                bigrams.add(text)
        if progress is not None:
            progress(document + 1, len(source.names))
    if not validation:
        message = f"every document ({len(source.names):,}) is empty"
        raise DataError(message, key=data.path, hint="set data.path to documents with text")
    if all(validation):
        message = f"every document ({len(validation):,}) is used for validation, none for training"
        raise DataError(message, key="data.validation_share", hint="lower it; 0 trains on every document")
    return Index(
        names=tuple(names),
        lengths=np.array(lengths, dtype=np.int64),
        validation=np.array(validation, dtype=np.bool_),
        fingerprint=fingerprint.hexdigest(),
        empty=source.blank + len(source.names) - len(names),
        bigram_nats=bigrams.entropy() if bigrams else None,
    )


def check_fingerprint(index: Index, fingerprint: str) -> None:
    """Raise DataError if the documents have changed: the index must have the `fingerprint` that a checkpoint stored."""
    if index.fingerprint != fingerprint:
        message = f"the documents changed since the run started ({index.fingerprint[:12]}, was {fingerprint[:12]})"
        hint = "restore them, or start a new run with another run.out"
        raise DataError(message, key="data.path", hint=hint)
