"""The documents of a run: a token file, split into training and validation.

A document of t tokens has t - 1 inputs: its last token is only a label. With BOS and EOS, a text of n tokens has n + 1
inputs. Letters: D documents of the token file.
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
from engine.data.pack import Facts, ensure_packed, hashes_path, read_facts
from engine.data.token_file import TokenFile
from engine.errors import ConfigError, DataError
from engine.units import Ints

_HASH_BYTES = 16
_ENDS = 1 << 16  # bytes at the end of a file of another tool that its fingerprint covers


@dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of a token file. Those without an input, with fewer than two tokens, are in neither set."""

    tokens: TokenFile
    facts: Facts | None  # None for a file of another tool
    lengths: Ints  # [D] numbers of inputs
    validation: NDArray[np.bool_]  # [D] True for validation

    @cached_property
    def training(self) -> Ints:
        """The numbers of the training documents, int64, ascending."""
        return np.flatnonzero(~self.validation & (self.lengths > 0)).astype(np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all documents; of sizes and the ends of the files, if another tool wrote them."""
        if self.facts is not None:
            return self.facts.contents
        found = blake2b(digest_size=_HASH_BYTES)
        for ending in (".idx", ".bin"):
            with Path(f"{self.tokens.prefix}{ending}").open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _ENDS))
                found.update(f"{size} ".encode() + file.read())
        return found.hexdigest()

    @property
    def empty(self) -> int:
        """The number of documents that were left out because they have no text."""
        return int((self.lengths < 1).sum()) + (self.facts.empty if self.facts else 0)

    @property
    def bigram_nats(self) -> float | None:
        """The bigram entropy of the documents (bigrams.py); None unless tokens are bytes."""
        return self.facts.bigram_nats if self.facts else None

    def read(self, document: int, start: int, stop: int, vocabulary: int) -> Ints:
        """Read tokens start .. stop - 1 of a document: int64 [stop - start].

        Raises DataError for a token that is not in the model's `vocabulary`.
        """
        found = self.tokens.read(document, start, stop)
        if len(found) and not 0 <= found.min() <= found.max() < vocabulary:
            wrong = int(found.min()) if found.min() < 0 else int(found.max())
            message = f"document {document} has token {wrong}, but the model's vocabulary has {vocabulary}"
            hint = f"set model.vocab to {wrong + 1} or more, or choose tokens of the model's tokenizer"
            raise DataError(message, key=f"{self.tokens.prefix}.bin", hint=hint if wrong >= 0 else None)
        return found


def corpus_of(data: schema.Data, say: Callable[[str], None]) -> Corpus:
    """Open the documents that a config names, which are packed first if they are not yet; `say` gets lines of progress.

    Raises DataError and StorageError as `ensure_packed` and `open_corpus` do.
    """
    return open_corpus(ensure_packed(data, say), data.validation_share)


def open_corpus(prefix: Path, validation_share: float) -> Corpus:
    """Open the documents of a token file; `validation_share` of them are for validation.

    Raises DataError for a file that cannot be used, if no document has two tokens, or if all are used for validation.
    """
    tokens = TokenFile.open(prefix)
    lengths = np.maximum(np.diff(tokens.bounds(0, len(tokens))) - 1, 0)
    # Decided by the hash of the content, so that no document is in both sets.
    validation = _hashes(prefix, len(tokens)) < validation_share * 2**64
    validation &= lengths > 0
    corpus = Corpus(tokens, read_facts(prefix), lengths, validation)
    if not (lengths > 0).any():
        message = f"every document ({len(tokens):,}) is empty"
        raise DataError(message, key=str(prefix), hint="set data.path to documents with text")
    if not len(corpus.training):
        message = f"every document ({int(validation.sum()):,}) is used for validation, none for training"
        raise DataError(message, key="data.validation_share", hint="lower it; 0 trains on every document")
    return corpus


def _hashes(prefix: Path, documents: int) -> NDArray[np.float64]:
    """Return a number from 0 to 2^64 for each document: of its content, or of its place in a file of another tool."""
    path = hashes_path(prefix)
    if path.exists():
        found = np.fromfile(path, dtype="<u8")
        if len(found) != documents:
            message = f"has {len(found):,} hashes for {documents:,} documents"
            raise DataError(message, key=str(path), hint="pack the documents again")
    else:
        found = np.random.Philox(key=0).random_raw(documents)
    return found.astype(np.float64)


def check_fingerprint(corpus: Corpus, fingerprint: str) -> None:
    """Raise DataError if the documents have changed: they must have the `fingerprint` that a checkpoint stored."""
    if corpus.fingerprint != fingerprint:
        message = f"the documents changed since the run started ({corpus.fingerprint[:12]}, was {fingerprint[:12]})"
        hint = "restore them, or start a new run with another run.out"
        raise DataError(message, key="data.path", hint=hint)


def check_vocabulary(corpus: Corpus, config: schema.Config) -> None:
    """Raise ConfigError if the documents may have tokens that are not in the model's vocabulary.

    The vocabulary of a token file of another tool is not known; each token is checked when it is read.
    """
    if corpus.facts is not None and corpus.facts.vocabulary > config.model.vocab:
        size = corpus.facts.vocabulary
        message = f"is smaller than the vocabulary of the documents' tokenizer, {size:,} ({corpus.facts.tokenizer})"
        hint = "set model.vocab={}" if config.run.weights is None else "choose run.weights with a vocabulary of {}"
        raise ConfigError(message, key=f"model.vocab={config.model.vocab}", hint=f"{hint.format(size)} or more")
