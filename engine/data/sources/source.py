"""The interface of document formats: a `Block` reads many documents in a row. And what all formats share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from engine.config import schema
from engine.errors import DataError
from engine.units import Ints

_MOST_BYTES = 1 << 30  # bytes that `profile-data` reads without --sample, in seconds
_PILOT_BYTES = 16 << 20
Message = dict[str, Any]  # of a chat: `role`, `content` (a string), and what else the template may use


class Document(NamedTuple):
    """A document, as a block reads it: a text, token ids that were made elsewhere, a chat, or why it cannot be used.

    Exactly one of `text`, `ids`, `messages` and `problem` is set.
    """

    place: str  # for error messages: a path, `path:byte OFFSET` of a line, or `path:row NUMBER`
    text: bytes | None  # validated, without BOS and EOS; empty for an empty file, a blank line, or an empty chat
    ids: Ints | None = None  # [n] with BOS and EOS, if they are wanted
    mask: NDArray[np.bool_] | None = None  # [n] True for ids that count in the loss; None: all do
    problem: DataError | None = None  # of this document alone; it names `place`
    messages: list[Message] | None = None  # validated; at least one is the assistant's
    tools: list[dict[str, Any]] | None = None  # that the assistant of `messages` may call, as JSON schemas
    trained: list[bool] | None = None  # for each of `messages`; None: all that the assistant says counts in the loss
    prompt: int = 0  # bytes at the beginning of `text` that do not count in the loss


class Block(Protocol):
    """Documents that are read together, by one process. It is pickled, so it must not contain an open file.

    Those of the formats are dataclasses whose fields are strings, integers and tuples of them, because a run lists them
    as JSON. Its `repr` identifies what is read and how, so that it can be recognised later. From `signature` on, a
    format with files of one document each, or with places that need no access to a file, has nothing to define.

    The blocks of a file together have each of its documents exactly once, whole and in order. Where blocks are cut by
    bytes, the bytes alone must say in which block a document begins: the lines of JSON do, quoted fields with line
    breaks do not. Three fields have a meaning by their names: `path`, of a file or a folder, is where the documents are
    and not how they are read (`reading`); `field` is the field or the shape of rows, and `read_lately` the fields that
    only later versions read (rows.py).

    `transform` has the steps of the source's transform as JSON, "" if there are none. `documents` does not apply them:
    packing does (transforms.py). The field is not in the repr, because earlier versions did not have it.
    """

    transform: str = ""

    @property
    def files(self) -> list[str]:
        """The paths or URLs of the files that the documents are read from; `files.stamp` says if one has changed."""
        ...

    @property
    def size(self) -> int:
        """The bytes that must be read for the documents, about, as of when the block was listed.

        The order of documents depends on it, so it must not change with the files, which are not opened for it.
        """
        ...

    def documents(self) -> Iterator[Document]:
        """Read the documents in order, those that cannot be used too: each document has the same number in every pass.

        Raises DataError for a file that cannot be read to its end.
        """
        ...

    @property
    def signature(self) -> str:
        """Identifies what is read and how, but not the state of the files: a part of the block's name in the cache."""
        return f"{self!r}, transform {self.transform}" if self.transform else repr(self)

    @property
    def reading(self) -> Mapping[str, Any]:
        """How the documents are read, apart from where the files are: a part of the fingerprint of a corpus."""
        # Blocks of versions that did not know `read_lately` and `transform` had no such fields.
        unset = {name for name in ("read_lately", "transform") if not getattr(self, name, "")}
        return {key: value for key, value in vars(self).items() if key not in {"path", *unset}}

    def where(self, place: str) -> str:
        """Return the place of one of the documents for people."""
        return self.named([place])[place]

    def named(self, places: Iterable[str]) -> Mapping[str, str]:
        """Return the places of documents for people, by place; also of documents in other blocks of the same files.

        A line gets its number, in one pass over the file.
        """
        return {place: place for place in places}

    def place_of(self, number: int, before: int) -> str | None:
        """Return the place for people of document `number` of the block, with `before` documents earlier in its file.

        None if it does not follow from these.
        """
        return None

    @property
    def continues(self) -> bool:
        """Whether the file begins in an earlier block."""
        return False

    def located(self, file: str, inside: str) -> str | None:
        """Return the place, as `documents` names it, of `inside` in a file, such as `:7`: line 7. None if it has none.

        A line is looked up in the file, which may be in another block.
        """
        return f"{file}{inside}"

    def has(self, place: str) -> bool:
        """Return whether a document at `place` in one of the files can be in this block."""
        return True

    def in_file(self, file: str) -> Iterable[int]:
        """Return the numbers of the documents of a file."""
        return (at for at, one in enumerate(self.documents()) if one.place == file or one.place.startswith(f"{file}:"))

    def after(self, file: str) -> Block | None:
        """Return the block of what follows a file that cannot be read to its end; None if there is nothing."""
        return None


def usable(block: Block) -> Iterator[Document]:
    """Read the documents of a block. Raises the problem of the first one that cannot be used."""
    for document in block.documents():
        if document.problem is not None:
            (problem,) = document.problem.problems
            raise DataError(problem.message, key=block.where(document.place), hint=problem.hint) from document.problem
        yield document


def with_transform(blocks: list[Block], data: schema.Data) -> list[Block]:
    """Return the blocks of a source with the steps of its transform."""
    if not data.transform:
        return blocks
    steps = json.dumps(data.transform, sort_keys=True)
    return [replace(cast(Any, block), transform=steps) for block in blocks]


def checked_text(text: bytes, encoding: str, place: str) -> bytes:
    """Return a text. Raises DataError if it is not UTF-8 with the encoding `utf-8`."""
    if encoding == "utf-8":
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            message, hint = f"is not UTF-8 at byte {error.start}", "data.encoding=bytes accepts any file"
            raise DataError(message, key=place, hint=hint) from error
    return text


def sample_blocks(blocks: Sequence[Block], sample: int | None, seed: int) -> tuple[list[Block], float]:
    """Choose random blocks with about `sample` documents; without `sample`, all, but about 1 GiB at most.

    All are chosen with the same probability. Returns blocks, and the fraction of the bytes that they contain.
    """

    def random(wanted: int) -> Ints:
        return choose(len(blocks), min(len(blocks), max(1, -(-wanted * len(blocks) // total))), seed)

    sizes = [block.size for block in blocks]
    total = sum(sizes)
    if total == 0 or (sample is None and total <= _MOST_BYTES):
        return list(blocks), 1.0
    wanted = _MOST_BYTES
    if sample is not None:  # estimate the number of documents per byte
        pilot = random(_PILOT_BYTES).tolist()
        found = sum(1 for number in pilot for _ in blocks[number].documents())
        wanted = -(-sample * sum(sizes[number] for number in pilot) // max(1, found))
    chosen = random(wanted).tolist()
    return [blocks[number] for number in chosen], sum(sizes[number] for number in chosen) / total


def choose(total: int, count: int, seed: int) -> Ints:
    """Draw `count` distinct numbers uniformly from 0 .. total - 1: int64 [count], ascending."""
    return np.sort(Generator(Philox(key=seed)).choice(total, count, replace=False)).astype(np.int64)
