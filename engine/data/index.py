"""What is known of the documents before any step is planned: their lengths, their split, and a fingerprint.

Letters: N documents that are not empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.config import schema
from engine.config.units import counted
from engine.data.bigrams import BigramCounts
from engine.data.source import Source, open_source
from engine.errors import DataError
from engine.planner.plan import Ints

_HASH_BYTES = 16


@dataclass(frozen=True, eq=False)
class Index:
    """The documents in the source's order, without the empty ones.

    A document of n text bytes has n + 1 inputs: BOS is one, and EOS is only a label.
    """

    names: tuple[str, ...]  # [N] relative path, or `file:line`
    lengths: Ints  # [N] inputs
    validation: NDArray[np.bool_]  # [N] kept for validation
    fingerprint: str  # of names, lengths and contents
    empty: int  # documents without a byte and blank lines, skipped
    bigram_nats: float  # H(next token | token) of the training documents, nats a token

    @cached_property
    def training(self) -> Ints:
        """Return the numbers of the documents that are trained on."""
        return np.flatnonzero(~self.validation).astype(np.int64)

    def save(self, path: Path) -> None:
        """Write the index to one file, for the ranks."""
        names = "\0".join(self.names).encode("utf-8", "surrogateescape")
        with path.open("wb") as file:
            np.savez(
                file,
                names=np.frombuffer(names, dtype=np.uint8),
                lengths=self.lengths,
                validation=self.validation,
                fingerprint=np.array(self.fingerprint),
                empty=np.array(self.empty),
                bigram_nats=np.array(self.bigram_nats),
            )

    @classmethod
    def load(cls, path: Path) -> Index:
        """Return the index that `save` wrote."""
        with np.load(path) as arrays:
            names = arrays["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")
            return cls(
                names=tuple(names),
                lengths=arrays["lengths"],
                validation=arrays["validation"],
                fingerprint=str(arrays["fingerprint"]),
                empty=int(arrays["empty"]),
                bigram_nats=float(arrays["bigram_nats"]),
            )


def build_index(data: schema.Data, progress: Callable[[int, int], None] | None = None) -> Index:
    """Read each document once and return the index; `progress(done, total)` is called after each.

    Raises DataError when a document is refused, when all are empty, and when none is left to train on.
    """
    source = open_source(data)
    names, lengths, validation = [], [], []
    fingerprint, bigrams = blake2b(digest_size=_HASH_BYTES), BigramCounts()
    for document, name in enumerate(source.names):
        text = source.read(document)
        if text:
            content = blake2b(text, digest_size=_HASH_BYTES).digest()
            fingerprint.update(_entry(name, len(text), content))
            names.append(name)
            lengths.append(len(text) + 1)
            validation.append(in_validation(content, data.validation_share))
            if not validation[-1]:
                bigrams.add(text)
        if progress is not None:
            progress(document + 1, len(source.names))
    _check_some(data, source, validation)
    return Index(
        names=tuple(names),
        lengths=np.array(lengths, dtype=np.int64),
        validation=np.array(validation, dtype=np.bool_),
        fingerprint=fingerprint.hexdigest(),
        empty=source.blank + len(source.names) - len(names),
        bigram_nats=bigrams.entropy(),
    )


def in_validation(content: bytes, share: float) -> bool:
    """Return whether the document of a content hash is kept for validation: equal documents fall on the same side."""
    return int.from_bytes(content[:8], "little") < share * 2**64


def check_fingerprint(index: Index, fingerprint: str) -> None:
    """Raise DataError unless the documents are those of `fingerprint`."""
    if index.fingerprint != fingerprint:
        message = f"the documents changed since the run began ({index.fingerprint[:12]}, was {fingerprint[:12]})"
        hint = "put them back, or start a new run with another run.out"
        raise DataError(message, key="data.path", hint=hint)


def _entry(name: str, size: int, content: bytes) -> bytes:
    """Return what the fingerprint takes of a document. A name ends at its NUL, the rest has a fixed size."""
    return name.encode("utf-8", "surrogateescape") + b"\0" + size.to_bytes(8, "little") + content


def _check_some(data: schema.Data, source: Source, validation: list[bool]) -> None:
    if not validation:
        message = f"no text in {counted(len(source.names), 'document')}"
        raise DataError(message, key=data.path, hint="set data.path to documents with text")
    if all(validation):
        message = f"{counted(len(validation), 'document')}, all for validation, and none is left to train on"
        raise DataError(message, key="data.validation_share", hint="lower it; 0 trains on every document")
