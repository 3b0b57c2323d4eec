"""The facts of a packed token file, and the names of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError
from engine.format_number import format_number
from engine.readers import read_object

SCHEMA = 4  # format of PREFIX.json, and of the parts in data.cache, whose names contain it
_open_tokenizer = cache(open_tokenizer)


@dataclass(frozen=True)
class Facts:
    """The facts of a token file that ByteScale packed; `PREFIX.json`."""

    tokenizer: str  # kind
    fingerprint: str  # of the tokenizer, with its special tokens
    vocabulary: int
    bos: int | None
    eos: int | None
    documents: int
    tokens: int
    empty: int  # documents without text, which are left out
    contents: str  # hash of all documents with their masks, and of the tokenizer
    masked: bool  # whether there is a PREFIX.mask
    broken: int = 0  # documents that cannot be used, which are left out and listed in PREFIX.quarantine.jsonl
    dropped: int = 0  # documents, and pieces of documents, that a transform left out
    source: Mapping[str, str] = field(default_factory=dict)  # see pack.py; earlier versions did not write it

    def made_by(self, tokenizer: str) -> bool:
        """Return whether a tokenizer, named as in a config, made the tokens. Raises DataError if it cannot be read."""
        try:
            found = _open_tokenizer(tokenizer, self.bos is not None, self.eos is not None)
        except DataError:
            _open_tokenizer(tokenizer)  # raises the error, unless the tokenizer only has no BOS or EOS
            return False
        return found.fingerprint == self.fingerprint


def facts_path(prefix: Path) -> Path:
    """The file with the facts of a token file."""
    return Path(f"{prefix}.json")


def hashes_path(prefix: Path) -> Path:
    """The file with a hash of the content of each document, uint64 [D]: it decides which ones are for validation."""
    return Path(f"{prefix}.hash")


def blocks_path(prefix: Path) -> Path:
    """The file with the first document and the size in bytes of each block, and the number of documents and 0.

    int64 [B + 1, 2]. The order of training is one of blocks, so it is the same for texts and for their token file.
    """
    return Path(f"{prefix}.blocks")


def quarantine_path(prefix: Path) -> Path:
    """The list of documents that cannot be used, which `pack` left out (quarantine.py)."""
    return Path(f"{prefix}.quarantine.jsonl")


def parts_path(prefix: Path) -> Path:
    """The folder with the blocks of a token file that `pack` has not finished."""
    return Path(f"{prefix}.parts")


def read_facts(prefix: Path) -> Facts | None:
    """Read the facts of a token file; None if another tool wrote it.

    Raises DataError if PREFIX.json is damaged, or if a newer version wrote it.
    """
    path = facts_path(prefix)
    try:
        found = read_object(path)
    except FileNotFoundError:
        return None
    except (OSError, DataError) as error:
        raise _not_described(prefix) from error
    if format_number(found, SCHEMA, str(path), key="schema") != SCHEMA:
        raise _not_described(prefix)
    try:
        return Facts(**{key: value for key, value in found.items() if key != "schema"})
    except TypeError as error:
        raise _not_described(prefix) from error


def _not_described(prefix: Path) -> DataError:
    hint = f"remove {prefix}.idx, and pack the documents again"
    return DataError("does not describe a token file of this version", key=str(facts_path(prefix)), hint=hint)
