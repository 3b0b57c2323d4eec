"""Packs documents into token files, from which training reads: every document is read and tokenized once.

The documents of a block become a small token file, which is named by what it contains. So it does not matter which
process packs a block, and packing continues after an interruption with the blocks that are missing. Training packs the
blocks that it needs next (loaders.py). `bytescale data pack` packs all, and joins them in their order.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from engine import files
from engine.config import schema
from engine.config.sources import BUILT_IN
from engine.data.cache import ENDINGS, folder_of, locked_part, move_into_place, remove_parts, write_part
from engine.data.encode import encode
from engine.data.quarantine import Quarantine, Unusable
from engine.data.sources.files import stamp
from engine.data.sources.formats import FORMATS
from engine.data.sources.notes import notes, nothing_to_train
from engine.data.sources.source import Block
from engine.data.sources.urls import is_url
from engine.data.token_file import TokenFile, TokenWriter, concatenate, token_dtype
from engine.data.tokenizers.load import open_tokenizer
from engine.data.tokenizers.tokenizer import Tokenizer
from engine.data.workers import cores, in_processes
from engine.errors import ConfigError, DataError, StorageError
from engine.folders import drafting, inside, opened
from engine.readers import HUGE, LARGE, read_bytes, read_object
from engine.units import Ints

SCHEMA = 4
_DOCUMENTS_VERSION = 2  # raised when the same rows become other documents, so that cached blocks are packed again
OTHERS = "it belongs to another user; use another data.cache, or change the permissions"  # a hint
_HASH_BYTES = 16
_POLL_S = 0.01  # while another process packs a block
JOINED_ENDINGS = (".json", ".idx", ".bin", ".mask", ".hash", ".blocks", ".quarantine.jsonl")  # of those of PREFIX
Progress = Callable[[int, int], None]  # gets the blocks that are done, and all blocks


@dataclass(frozen=True)
class Tokens:
    """How documents become tokens."""

    tokenizer: str  # as in the config
    bos: bool | None
    eos: bool | None
    quarantine_after: int = 0  # so many documents in a row that cannot be used are an error; others are left out
    known: str | None = None  # fingerprint of the tokenizer, which is then opened only if something must be packed

    @classmethod
    def of(cls, data: schema.Data, known: str | None = None) -> Tokens:
        return cls(data.tokenizer, data.bos, data.eos, data.quarantine_after, known)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the tokenizer."""
        return self.known or self.open().fingerprint

    def open(self) -> Tokenizer:
        """Open the tokenizer. Raises DataError as `open_tokenizer` does, and if it is another one than is known."""
        found = _open_tokenizer(self.tokenizer, self.bos, self.eos, tried=self.known is not None)
        if self.known not in (None, found.fingerprint):
            hint = "restore it, or run the same command again, which says what has changed"
            raise DataError("is no longer the tokenizer that the run was started with", key=self.tokenizer, hint=hint)
        return found


_open_tokenizer = cache(open_tokenizer)


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
    contents: str  # hash of all documents with their masks, and of the tokenizer
    masked: bool  # whether there is a PREFIX.mask
    broken: int = 0  # documents that cannot be used, which are left out and listed in PREFIX.quarantine.jsonl
    source: Mapping[str, str] = field(default_factory=dict)  # see `_source`; earlier versions did not write it

    def made_by(self, tokenizer: str) -> bool:
        """Return whether a tokenizer, named as in a config, made the tokens. Raises DataError if it cannot be read."""
        try:
            found = _open_tokenizer(tokenizer, self.bos is not None, self.eos is not None)
        except DataError:
            _open_tokenizer(tokenizer)  # raises the error, unless the tokenizer only has no BOS or EOS
            return False
        return found.fingerprint == self.fingerprint


def facts_path(prefix: Path) -> Path:
    """The file that says what is known about a token file."""
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


def pack(
    data: schema.Data,
    prefix: Path,
    workers: int | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Facts:
    """Write the documents of a source as PREFIX.bin, .idx, .hash, .blocks and .json, with `workers` processes.

    None uses all cores. `say` gets the lines of `notes`. Parts that an
    interrupted call has written are used again. A token file at PREFIX is replaced if it has the same documents, which
    may have grown; it stays as it is until the new one is complete. Raises ConfigError if it has others, DataError for
    an invalid document or if none has text, StorageError if writing fails or another process is packing the same file.
    """
    tokens = Tokens.of(data)
    _refuse_other(prefix, data, tokens.fingerprint)
    blocks = FORMATS[data.format].blocks(data)
    for line in notes(data, blocks):
        say(line)
    parts = parts_path(prefix)
    try:
        with opened(parts, make=True, follow_links=False) as folder, files.locked(inside(folder) / files.LOCK):
            pack_blocks(tokens, parts, blocks, workers, progress)
            written = [part_path(tokens, parts, block) for block in blocks]
            with drafting(prefix, folder) as draft:
                facts = _join(blocks, written, draft.path / prefix.name, tokens.open(), data)
                if facts.documents:
                    facts_path(prefix).unlink(missing_ok=True)  # so that it never describes other documents
                    move_into_place(draft.path, prefix, JOINED_ENDINGS)
            remove_parts(folder)
            (inside(folder) / files.LOCK).unlink()
        with suppress(OSError):  # it has other files
            parts.rmdir()
    except BlockingIOError as error:
        message, hint = "another process is packing these documents", "wait until it ends"
        raise StorageError(message, key=str(prefix), hint=hint) from error
    except OSError as error:
        raise _unwritable(error, prefix) from error
    if not facts.documents:
        raise nothing_to_train(data.path_text, blocks, facts.empty, facts.broken)
    return facts


def _source(data: schema.Data) -> dict[str, str]:
    """Return what names the documents of a source: keys of `data` and their values, with absolute paths."""
    paths = [path if is_url(path) or path in BUILT_IN else os.path.realpath(path) for path in data.paths]
    path = paths[0] if isinstance(data.path, str) else f"[{','.join(paths)}]"
    named = {
        "format": data.format,
        "path": path,
        "pattern": data.pattern,
        "field": data.field,
        "encoding": data.encoding,
    }
    return named if data.separator is None else named | {"separator": data.separator}


def _refuse_other(prefix: Path, data: schema.Data, fingerprint: str) -> None:
    """Raise ConfigError if PREFIX is a token file of other documents, another tokenizer, or another tool.

    One that was not finished is none.
    """
    index = Path(f"{prefix}.idx")
    if not index.exists():
        return
    facts, source = read_facts(prefix), _source(data)
    if facts is None:
        if parts_path(prefix).exists():
            return
        found = "is a token file of another tool"
    elif facts.fingerprint != fingerprint:
        found = "was packed with another tokenizer"
    elif facts.source != source:
        theirs = [f"data.{key}={value}" for key, value in facts.source.items() if source.get(key) != value]
        found = f"was packed from {', '.join(theirs)}" if theirs else "may have other documents"
    else:
        return
    hint = f"choose another --out, or remove {index} to replace it"
    raise ConfigError(f"{prefix} {found}", key="--out", hint=hint)


def pack_blocks(
    tokens: Tokens, folder: Path, blocks: Sequence[Block], workers: int | None = None, progress: Progress | None = None
) -> None:
    """Pack the blocks that are not yet in `folder`, with `workers` processes; None uses all cores.

    Raises DataError and StorageError as `pack_block` does.
    """
    missing = [block for block in blocks if not is_packed(part_path(tokens, folder, block))]
    hint = "use fewer processes with --workers, or close other programs"
    work = partial(pack_block, tokens, folder)
    for done, _ in enumerate(in_processes(work, missing, workers or cores(), hint), start=1):
        if progress is not None:
            progress(len(blocks) - len(missing) + done, len(blocks))


def pack_block(tokens: Tokens, folder: Path, block: Block, wait: bool = True) -> bool:
    """Write the token file of a block, unless it is there already. It is `part_path(...)`. Returns whether it is there.

    While another process packs the same block, wait for it; if that process ends before it has finished, pack the block
    here. Without `wait`, return False at once. Raises DataError for a document that cannot be used, StorageError if
    writing fails.
    """
    part = part_path(tokens, folder, block)
    try:
        with folder_of(part) as here:
            while not is_packed(part):
                with suppress(BlockingIOError), locked_part(here, part.name):
                    if not is_packed(part):
                        write_part(here, part.name, partial(_write_block, tokens, block))
                if not is_packed(part):
                    if not wait:
                        return False
                    time.sleep(_POLL_S)
    except OSError as error:
        raise _unwritable(error, part) from error
    return True


def part_path(tokens: Tokens, folder: Path, block: Block) -> Path:
    """Return the prefix of the token file of a block in `folder`. It changes with its files' sizes and times."""
    stamps = [stamp(path) for path in block.files]
    # With another number, a document that was left out may be an error.
    key = repr((SCHEMA, _DOCUMENTS_VERSION, tokens.fingerprint, tokens.quarantine_after, block, stamps))
    name = blake2b(key.encode("utf-8", "surrogateescape"), digest_size=_HASH_BYTES).hexdigest()
    return folder / name[:2] / name


class Broken(NamedTuple):
    """A document that cannot be used."""

    document: int  # number among all documents of its block
    place: str
    reason: str


class LeftOut(NamedTuple):
    """What the token file of a block does not contain, and whether it has a mask."""

    empty: list[int]  # numbers, among all documents of the block, of those without any token to predict
    broken: list[Broken]
    masked: bool = False

    def numbers(self, documents: int) -> Ints:
        """Return the number of each of the `documents` of the token file among all documents of the block: int64 [D]"""
        left_out = np.array([*self.empty, *(one.document for one in self.broken)], dtype=np.int64)
        return np.setdiff1d(np.arange(documents + len(left_out)), left_out)


def read_left_out(part: Path) -> LeftOut:
    """Read what the token file of a block does not contain. Raises DataError if the file is damaged."""
    try:
        found = read_object(facts_path(part), LARGE)
        return LeftOut(found["empty"], [Broken(*one) for one in found["broken"]], found["masked"])
    except (OSError, DataError, ValueError, TypeError, KeyError) as error:
        hint = "remove this folder; what it contains is packed again"
        raise DataError("is damaged", key=str(facts_path(part)), hint=hint) from error


def is_packed(part: Path) -> bool:
    """Return whether the token file of a block is complete.

    The index is written last and removed first; but programs that tidy up a disk may have removed any file.
    """
    with suppress(PermissionError):  # packing it will raise the error
        return all(Path(f"{part}{ending}").exists() for ending in ENDINGS if ending != ".mask")
    return False


def _write_block(tokens: Tokens, block: Block, part: Path) -> None:
    """Write the token file of a block, with hashes of its documents and what was left out."""
    tokenizer, left_out, in_row = tokens.open(), LeftOut([], []), 0
    hashes, masked = list[bytes](), False
    with TokenWriter(part, token_dtype(tokenizer.vocabulary)) as writer:
        for number, document in enumerate(block.documents()):
            try:
                ids, mask = encode(document, tokenizer)
            except DataError as error:
                in_row += 1
                (problem,) = error.problems
                if in_row < tokens.quarantine_after:
                    left_out.broken.append(Broken(number, document.place, problem.message))
                    continue
                several = f"; {in_row} documents in a row cannot be used" if in_row > 1 else ""
                place = block.where(document.place)
                raise DataError(f"{problem.message}{several}", key=place, hint=problem.hint) from error
            in_row = 0
            if len(ids) and (mask is None or mask[1:].any()):
                content = ids.astype("<i8").tobytes() if document.text is None else document.text
                if mask is not None and not mask.all():  # other labels are another document
                    content, masked = content + np.packbits(mask, bitorder="little").tobytes(), True
                hashes.append(blake2b(content, digest_size=8).digest())
                writer.add(ids, mask)
            else:
                left_out.empty.append(number)
        files.write_durably(hashes_path(part), b"".join(hashes))
        files.write_durably(facts_path(part), json.dumps(left_out._replace(masked=masked)._asdict()).encode())


def _join(blocks: Sequence[Block], parts: list[Path], prefix: Path, tokenizer: Tokenizer, data: schema.Data) -> Facts:
    """Join the token files of all blocks, and write what is known about them."""
    quarantine, empty, broken, first = Quarantine(quarantine_path(prefix)), 0, 0, [0]
    contents = blake2b(tokenizer.fingerprint.encode(), digest_size=_HASH_BYTES)
    with files.new_file(hashes_path(prefix)) as file:
        for number, part in enumerate(parts):
            left_out = read_left_out(part)
            TokenFile.open(part).check_mask(left_out.masked)
            empty, broken = empty + len(left_out.empty), broken + len(left_out.broken)
            quarantine.add(0, [Unusable("data", number, *one) for one in left_out.broken])
            hashes = read_bytes(hashes_path(part), HUGE)
            first.append(first[-1] + len(hashes) // 8)
            contents.update(hashes)
            file.write(hashes)
        os.fsync(file.fileno())
    table = np.array([first, [*(block.size for block in blocks), 0]], dtype="<i8").T
    files.write_durably(blocks_path(prefix), table.tobytes())
    contents.update(table.tobytes())  # decides the order
    concatenate(parts, prefix, token_dtype(tokenizer.vocabulary))
    joined = TokenFile.open(prefix)
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
        masked=joined.mask is not None,
        broken=broken,
        source=_source(data),
    )
    files.write_json(facts_path(prefix), {"schema": SCHEMA, **asdict(facts)})
    return facts


def read_facts(prefix: Path) -> Facts | None:
    """Read what is known about a token file; None if it was written by another tool.

    Raises DataError if PREFIX.json is damaged.
    """
    path = facts_path(prefix)
    try:
        found = read_object(path)
        if found.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        return Facts(**found)
    except FileNotFoundError:
        return None
    except (OSError, DataError, ValueError, TypeError, KeyError) as error:
        message = "does not describe a token file of this version"
        hint = f"remove {prefix}.idx, and pack the documents again"
        raise DataError(message, key=str(path), hint=hint) from error


def _unwritable(error: OSError, place: Path) -> StorageError:
    option = "with data.cache=DIR, or --out for `bytescale data pack`"
    hint = f"choose a folder with free space {option}"
    if error.errno in (errno.EACCES, errno.EPERM):
        hint = OTHERS
    elif error.errno == errno.EROFS:
        hint = f"choose a folder that you can write to {option}"
    elif error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        hint = f"its file system has no locks; choose a folder of another one {option}"
    return StorageError(f"cannot be written: {error.strerror}", key=str(error.filename or place), hint=hint)
