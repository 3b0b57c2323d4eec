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
from engine.data.token_file import Numbers, TokenFile
from engine.errors import ConfigError, DataError
from engine.units import Ints

_HASH_BYTES = 16
_CHUNK = 1 << 20  # documents
_ENDS = 1 << 16  # bytes at the end of a file of another tool that its fingerprint covers


@dataclass
class Counts:
    """Numbers of documents, and the most inputs that a document has."""

    training: int = 0
    validation: int = 0
    longest: int = 0


@dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of a token file, of which a process reads what it needs.

    Documents without an input, with fewer than two tokens, are neither for training nor for validation.
    """

    tokens: TokenFile
    facts: Facts | None  # None for a file of another tool
    hashes: Numbers | None  # of the contents, 8 bytes each; None for a file of another tool
    validation_share: float

    def __len__(self) -> int:
        return len(self.tokens)

    def inputs(self, first: int, last: int) -> tuple[Ints, NDArray[np.bool_]]:
        """Return how many inputs documents first .. last - 1 have, and which are for validation, [last - first].

        The hash of the content decides, so that no document is in both sets; in a file of another tool, the number.
        """
        lengths = np.maximum(np.diff(self.tokens.bounds(first, last)) - 1, 0)
        if self.hashes is None:
            generator = np.random.Philox(key=0).advance(first // 4)  # draws four numbers at a time
            drawn = generator.random_raw(last - first + 4)[first % 4 :][: last - first]
        else:
            drawn = self.hashes.read("<u8", last - first, 8 * first)
        return lengths, (drawn / 2.0**64 < self.validation_share) & (lengths > 0)

    @cached_property
    def counts(self) -> Counts:
        """Count all documents, which reads their index."""
        found = Counts()
        for first in range(0, len(self), _CHUNK):
            lengths, validation = self.inputs(first, min(first + _CHUNK, len(self)))
            found.training += int((lengths > 0).sum() - validation.sum())
            found.validation += int(validation.sum())
            found.longest = max(found.longest, int(lengths.max()))
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all documents and their tokenizer; of sizes and the ends of the files, if another tool wrote them."""
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
        return len(self) - self.counts.training - self.counts.validation + (self.facts.empty if self.facts else 0)

    @property
    def bigram_nats(self) -> float | None:
        """The bigram entropy of the documents (bigrams.py); None unless tokens are bytes."""
        return self.facts.bigram_nats if self.facts else None


@dataclass(frozen=True)
class Reader:
    """Reads tokens for a model whose vocabulary has `vocabulary` tokens."""

    corpus: Corpus
    vocabulary: int

    def tokens(self, document: int, start: int, stop: int) -> Ints:
        """Read tokens start .. stop - 1 of a document: int64 [stop - start].

        Raises DataError for a token that is not in the vocabulary.
        """
        found = self.corpus.tokens.read(document, start, stop)
        if len(found) and not 0 <= found.min() <= found.max() < self.vocabulary:
            wrong = int(found.min()) if found.min() < 0 else int(found.max())
            message = f"document {document} has token {wrong}, but the model's vocabulary has {self.vocabulary}"
            hint = f"set model.vocab to {wrong + 1} or more, or choose tokens of the model's tokenizer"
            place = f"{self.corpus.tokens.prefix}.bin"
            raise DataError(message, key=place, hint=hint if wrong >= 0 else None)
        return found


def corpus_of(data: schema.Data, say: Callable[[str], None]) -> Corpus:
    """Open the documents that a config names, which are packed first if they are not yet; `say` gets lines of progress.

    Raises DataError and StorageError as `ensure_packed`, `open_corpus` and `check_documents` do.
    """
    corpus = open_corpus(ensure_packed(data, say), data.validation_share)
    check_documents(corpus)
    return corpus


def open_corpus(prefix: Path, validation_share: float) -> Corpus:
    """Open the documents of a token file; `validation_share` of them are for validation. Raises DataError if the file
    cannot be used."""
    tokens, path, hashes = TokenFile.open(prefix), hashes_path(prefix), None
    if path.exists():
        if path.stat().st_size != 8 * len(tokens):
            message = f"has {path.stat().st_size // 8:,} hashes for {len(tokens):,} documents"
            raise DataError(message, key=str(path), hint="pack the documents again")
        hashes = Numbers(path)
    return Corpus(tokens, read_facts(prefix), hashes, validation_share)


def check_documents(corpus: Corpus) -> None:
    """Raise DataError if no document has two tokens, or if all are used for validation."""
    training, validation = corpus.counts.training, corpus.counts.validation
    if not training + validation:
        message = f"every document ({len(corpus):,}) is empty" if len(corpus) else "contains no documents"
        raise DataError(message, key=str(corpus.tokens.prefix), hint="set data.path to documents with text")
    if not training:
        message = f"every document ({validation:,}) is used for validation, none for training"
        raise DataError(message, key="data.validation_share", hint="lower it; 0 trains on every document")


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
