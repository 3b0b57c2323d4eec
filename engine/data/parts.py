"""Packs the documents of a block into a separate token file, a part: every document is read and tokenized once.

The name of a part depends on its contents alone. Any process may therefore pack a block, and packing continues after an
interruption with the blocks that are missing. Training packs the blocks that it needs next (loaders.py).
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine import files
from engine.config import schema
from engine.data.cache import ENDINGS, folder_of, locked_part, write_part
from engine.data.sources.files import stamp
from engine.data.sources.source import Block
from engine.data.token_facts import SCHEMA, facts_path, hashes_path
from engine.data.token_file import TokenWriter, token_dtype
from engine.data.tokenizers.load import open_tokenizer
from engine.data.tokenizers.tokenizer import Tokenizer
from engine.data.transforms.transforms import transformed
from engine.data.workers import cores, in_processes
from engine.errors import DataError, StorageError
from engine.readers import LARGE, read_object
from engine.units import Ints

_DOCUMENTS_VERSION = 2  # raised when the same rows become other documents, so that cached blocks are packed again
OTHERS = "it belongs to another user; use another data.cache, or change the permissions"  # a hint
_HASH_BYTES = 16
_POLL_S = 0.01  # while another process packs a block
_open_tokenizer = cache(open_tokenizer)
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
            hint = "restore it, or run the same command again, which reports the change"
            raise DataError("is no longer the tokenizer that the run was started with", key=self.tokenizer, hint=hint)
        return found


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
    """Write the token file of a block, `part_path(...)`, unless it exists. Returns whether it exists afterwards.

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
        raise unwritable(error, part) from error
    return True


def part_path(tokens: Tokens, folder: Path, block: Block) -> Path:
    """Return the prefix of the token file of a block in `folder`. It changes with its files' sizes and times."""
    stamps = [stamp(path) for path in block.files]
    # With another number, a document that was left out may be an error.
    version = f"{SCHEMA}, {_DOCUMENTS_VERSION}, {tokens.fingerprint!r}, {tokens.quarantine_after}"
    key = f"({version}, {block.signature}, {stamps})"
    name = blake2b(key.encode("utf-8", "surrogateescape"), digest_size=_HASH_BYTES).hexdigest()
    return folder / name[:2] / name


class Broken(NamedTuple):
    """A document that cannot be used."""

    document: int  # number among all documents of its block
    place: str
    reason: str


class LeftOut(NamedTuple):
    """The documents that the token file of a block leaves out, and whether it has a mask."""

    empty: list[int]  # numbers, among all documents of the block, of those without any token to predict
    broken: list[Broken]
    masked: bool = False
    # The number of each other document that does not have exactly one piece, and how many it has
    pieces: tuple[tuple[int, int], ...] = ()
    dropped: int = 0  # documents, and pieces of documents, that a transform left out

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> LeftOut:
        """Return what `_asdict` returned as plain data, also in a version without transforms.

        Raises KeyError, TypeError and ValueError for other data.
        """
        broken = [Broken(*one) for one in found["broken"]]
        pieces = tuple((int(number), int(count)) for number, count in found.get("pieces", ()))
        return cls(found["empty"], broken, found["masked"], pieces, int(found.get("dropped", 0)))

    def numbers(self, documents: int) -> Ints:
        """Return the number of each of the `documents` of the token file among all documents of the block: int64 [D]"""
        counts = dict.fromkeys([*self.empty, *(one.document for one in self.broken)], 0) | dict(self.pieces)
        pieces = np.ones(documents + sum(1 - count for count in counts.values()), dtype=np.int64)
        for number, count in counts.items():
            pieces[number] = count
        return np.repeat(np.arange(len(pieces)), pieces)


def read_left_out(part: Path) -> LeftOut:
    """Read which documents the token file of a block leaves out. Raises DataError if the file is damaged."""
    try:
        return LeftOut.of_json(read_object(facts_path(part), LARGE))
    except (OSError, DataError, ValueError, TypeError, KeyError) as error:
        hint = "remove this folder; its contents are packed again"
        raise DataError("is damaged", key=str(facts_path(part)), hint=hint) from error


def is_packed(part: Path) -> bool:
    """Return whether the token file of a block is complete.

    The index is written last and removed first; but programs that tidy up a disk may have removed any file.
    """
    with suppress(PermissionError):  # packing it will raise the error
        return all(Path(f"{part}{ending}").exists() for ending in ENDINGS if ending != ".mask")
    return False


def _write_block(tokens: Tokens, block: Block, part: Path) -> None:
    """Write the token file of a block, with hashes of its documents and a list of those left out."""
    tokenizer, left_out, in_row = tokens.open(), LeftOut([], []), 0
    hashes, masked, several, all_dropped = list[bytes](), False, list[tuple[int, int]](), 0
    with TokenWriter(part, token_dtype(tokenizer.vocabulary)) as writer:
        for number, document in enumerate(block.documents()):
            try:
                pieces, dropped, _ = transformed(document, block.transform, tokenizer)
                encoded = [(*piece.encoded, piece.content) for piece in pieces]
            except DataError as error:
                in_row += 1
                (problem,) = error.problems
                if in_row < tokens.quarantine_after:
                    left_out.broken.append(Broken(number, document.place, problem.message))
                    continue
                in_all = f"; {in_row} documents in a row cannot be used" if in_row > 1 else ""
                place = block.where(document.place)
                raise DataError(f"{problem.message}{in_all}", key=place, hint=problem.hint) from error
            in_row, all_dropped, before = 0, all_dropped + dropped, len(hashes)
            for ids, mask, content in encoded:
                if len(ids) and (mask is None or mask[1:].any()):
                    masked = masked or (mask is not None and not mask.all())
                    hashes.append(blake2b(content, digest_size=8).digest())
                    writer.add(ids, mask)
            written = len(hashes) - before
            if not written and not dropped:
                left_out.empty.append(number)
            elif written != 1:
                several.append((number, written))
        left_out = left_out._replace(masked=masked, pieces=tuple(several), dropped=all_dropped)
        files.write_durably(hashes_path(part), b"".join(hashes))
        files.write_durably(facts_path(part), json.dumps(left_out._asdict()).encode())


def unwritable(error: OSError, place: Path) -> StorageError:
    option = "with data.cache=DIR, or --out for `bytescale data pack`"
    hint = f"choose a folder with free space {option}"
    if error.errno in (errno.EACCES, errno.EPERM):
        hint = OTHERS
    elif error.errno == errno.EROFS:
        hint = f"choose a folder that you can write to {option}"
    elif error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        hint = f"its file system has no locks; choose a folder of another one {option}"
    key = Path(error.filename or place)
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        file = next((one for one in (key, *key.parents) if one.is_file()), None)
        if file is not None:
            return StorageError("is a file, not a folder", key=str(file), hint=f"choose a folder {option}")
    return StorageError(f"cannot be written: {error.strerror}", key=str(key), hint=hint)
