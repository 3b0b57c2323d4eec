"""Packs documents into a token file, from which training reads: every document is read and tokenized once.

The documents of each block become a small token file, written by any number of processes; then the files are joined in
the order of the blocks. So the result does not depend on the number of processes. Small files are named by what they
contain, so that packing continues after an interruption with the blocks that are missing.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from engine import files
from engine.config import schema
from engine.data.bigrams import BigramCounts
from engine.data.sources.files import stamp
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import MASK, Block, Document
from engine.data.token_file import TokenFile, TokenWriter, concatenate, token_dtype
from engine.data.tokenizers.load import open_tokenizer
from engine.data.tokenizers.tokenizer import Ids, Tokenizer
from engine.data.workers import cores, in_processes
from engine.errors import DataError, StorageError

SCHEMA = 1
_HASH_BYTES = 16
_SECONDS = 5.0  # between two lines of progress
Progress = Callable[[int, int], None]  # gets the blocks that are done, and all blocks


@dataclass(frozen=True)
class Tokens:
    """What decides the tokens of a text."""

    tokenizer: str  # as in the config
    bos: bool | None
    eos: bool | None

    @classmethod
    def of(cls, data: schema.Data) -> Tokens:
        return cls(data.tokenizer, data.bos, data.eos)

    def open(self) -> Tokenizer:
        """Open the tokenizer. Raises DataError as `open_tokenizer` does."""
        return _tokenizer(self)


@cache
def _tokenizer(tokens: Tokens) -> Tokenizer:
    return open_tokenizer(tokens.tokenizer, tokens.bos, tokens.eos)


@dataclass(frozen=True)
class Facts:
    """What is known about a token file that was packed here; `PREFIX.json`."""

    tokenizer: str  # kind
    fingerprint: str  # of the tokenizer, with its special tokens
    vocabulary: int
    bos: int | None
    eos: int | None
    documents: int
    tokens: int
    empty: int  # documents without text, which are left out
    contents: str  # hash of all documents and of the tokenizer
    bigram_nats: float | None  # bigram entropy of the documents (bigrams.py); None unless tokens are bytes


def facts_path(prefix: Path) -> Path:
    """The file that says what is known about a token file."""
    return Path(f"{prefix}.json")


def hashes_path(prefix: Path) -> Path:
    """The file with a hash of the content of each document, uint64 [D]: it decides which ones are for validation."""
    return Path(f"{prefix}.hash")


def pack(data: schema.Data, prefix: Path, workers: int | None = None, progress: Progress | None = None) -> Facts:
    """Write the documents of a source as PREFIX.bin, .idx, .hash and .json, with `workers` processes.

    None uses all cores. Parts that an interrupted call has written are used again. Raises DataError for an invalid
    document or if none has text, StorageError if writing fails or another process is packing the same file.
    """
    tokenizer = Tokens.of(data).open()
    blocks = FORMATS[data.format].blocks(data)
    parts = Path(f"{prefix}.parts")
    try:
        parts.mkdir(parents=True, exist_ok=True)
        with files.locked(parts / files.LOCK):
            work = partial(_pack_block, Tokens.of(data), parts)
            hint = "use fewer processes with --workers, or close other programs"
            written = []
            for one in in_processes(work, blocks, workers or cores(), hint):
                written.append(one)
                if progress is not None:
                    progress(len(written), len(blocks))
            facts = _join(written, prefix, tokenizer, data)
        shutil.rmtree(parts)
    except BlockingIOError as error:
        message, hint = "another process is packing these documents", "wait until it ends"
        raise StorageError(message, key=str(prefix), hint=hint) from error
    except OSError as error:
        hint = "choose a folder with free space; for training, with data.cache"
        place = str(error.filename or prefix)
        raise StorageError(f"cannot be written: {error.strerror}", key=place, hint=hint) from error
    return facts


def ensure_packed(data: schema.Data, say: Callable[[str], None]) -> Path:
    """Return the prefix of the token file of a source, which is packed into the cache folder if it is not there.

    `say` gets lines of progress. Raises DataError and StorageError as `pack` does.
    """
    if data.format == "tokens":
        return Path(data.path)
    blocks = FORMATS[data.format].blocks(data)
    prefix = cache_folder(data) / _name(blocks, Tokens.of(data).open())
    if not facts_path(prefix).exists():
        shown = time.monotonic()

        def progress(done: int, total: int) -> None:
            nonlocal shown
            if time.monotonic() - shown > _SECONDS:
                shown = time.monotonic()
                say(f"packing documents of {data.path}: {done / total:.0%}")

        pack(data, prefix, progress=progress)
    return prefix


def cache_folder(data: schema.Data) -> Path:
    """The folder for token files of sources that training reads: `data.cache`, or one in the user's cache folder."""
    if data.cache is not None:
        return Path(data.cache)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "bytescale" / "tokens"


def _pack_block(tokens: Tokens, folder: Path, block: Block) -> Path:
    """Write the token file of a block, unless it is there already; return its prefix."""
    tokenizer = tokens.open()
    part = folder / _name([block], tokenizer)
    if Path(f"{part}.idx").exists():
        return part
    empty, hashes, bigrams = 0, list[bytes](), BigramCounts()
    with TokenWriter(part, token_dtype(tokenizer.vocabulary)) as writer:
        for document in block.documents():
            ids = _ids(document, tokenizer)
            if not len(ids):
                empty += 1
                continue
            content = ids.astype("<i8").tobytes() if document.text is None else document.text
            hashes.append(blake2b(content, digest_size=_HASH_BYTES).digest())
            writer.add(ids)
            if _counts_bigrams(tokenizer) and document.text is not None:
                bigrams.add(ids)
        # Before the index, whose presence says that all is there.
        joined = np.frombuffer(b"".join(hashes), np.uint8)
        np.savez(Path(f"{part}.npz"), empty=empty, hashes=joined, bigrams=bigrams.counts())
    return part


def _ids(document: Document, tokenizer: Tokenizer) -> Ids:
    """Return the ids of a document with BOS and EOS, [n]; none for an empty text. Token ids stay as they are.

    Raises DataError for ids that the tokenizer does not have, and for a mask that excludes some from the loss.
    """
    if document.text is not None:
        if not document.text:
            return np.empty(0, dtype=np.int32)
        try:
            return tokenizer.document(document.text)
        except DataError as error:
            (problem,) = error.problems
            raise DataError(problem.message, key=document.place, hint=problem.hint) from error
    assert document.ids is not None
    if document.mask is not None and not document.mask.all():
        message, hint = "excludes tokens from the loss, which is not supported yet", f"remove {MASK}, or the document"
        raise DataError(message, key=document.place, hint=hint)
    if len(document.ids) and document.ids.max() >= tokenizer.vocabulary:
        message = f"has token {document.ids.max()}, but {tokenizer.kind} has a vocabulary of {tokenizer.vocabulary:,}"
        raise DataError(message, key=document.place, hint="set data.tokenizer to the tokenizer that made the ids")
    return document.ids.astype(np.int32)


def _counts_bigrams(tokenizer: Tokenizer) -> bool:
    """Return whether bigrams are counted: of bytes alone (bigrams.py), and with EOS, which separates documents."""
    return tokenizer.kind == "bytes" and tokenizer.eos is not None


def _name(blocks: Sequence[Block], tokenizer: Tokenizer) -> str:
    """Return a name for the tokens of some blocks. It changes with their files' sizes and times of modification."""
    found = blake2b(f"{SCHEMA} {tokenizer.fingerprint}".encode(), digest_size=_HASH_BYTES)
    for block in blocks:
        found.update(repr((block, [stamp(path) for path in block.files])).encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def _join(parts: list[Path], prefix: Path, tokenizer: Tokenizer, data: schema.Data) -> Facts:
    """Join the token files of all blocks, and write what is known about them.

    PREFIX.json is removed first and written last, so that it never describes other documents.
    """
    facts_path(prefix).unlink(missing_ok=True)
    empty, bigrams = 0, BigramCounts()
    contents = blake2b(tokenizer.fingerprint.encode(), digest_size=_HASH_BYTES)
    draft = Path(f"{hashes_path(prefix)}.writing")
    with draft.open("wb") as file:
        for part in parts:
            with np.load(f"{part}.npz") as found:
                empty += int(found["empty"])
                bigrams.merge(found["bigrams"])
                contents.update(found["hashes"].tobytes())
                file.write(found["hashes"].reshape(-1, _HASH_BYTES)[:, :8].tobytes())
        os.fsync(file.fileno())
    draft.replace(hashes_path(prefix))
    concatenate(parts, prefix, token_dtype(tokenizer.vocabulary))
    joined = TokenFile.open(prefix)
    if not len(joined):
        message = f"every document ({empty:,}) is empty" if empty else "contains no documents"
        raise DataError(message, key=data.path, hint="set data.path to documents with text")
    facts = Facts(
        tokenizer=tokenizer.kind,
        fingerprint=tokenizer.fingerprint,
        vocabulary=tokenizer.vocabulary,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        documents=len(joined),
        tokens=joined.tokens,
        empty=empty,
        contents=contents.hexdigest(),
        bigram_nats=bigrams.entropy() if _counts_bigrams(tokenizer) else None,
    )
    files.write_json(facts_path(prefix), {"schema": SCHEMA, **asdict(facts)})
    return facts


def read_facts(prefix: Path) -> Facts | None:
    """Read what is known about a token file; None if it was written by another tool.

    Raises DataError if PREFIX.json is damaged.
    """
    path = facts_path(prefix)
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        return Facts(**found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        message, hint = "does not describe a token file of this version", "pack the documents again"
        raise DataError(message, key=str(path), hint=hint) from error
