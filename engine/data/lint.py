"""Reads all documents of a config and finds faults: those that training refuses, and those that it would learn from.

Memory is bounded: a process holds a part of a block (docs/data.md) and one document with its tokens at a time, and
records of 64K documents; the caller holds a few examples of each fault, how often each length occurs (at most
sqrt(2 x tokens) lengths), and up to 4M documents' records when it looks for copies (copies.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.config import schema
from engine.data.copies import find_copies, record, write_records
from engine.data.encode import encode
from engine.data.profile import histogram
from engine.data.sources.arrow import arrow_files
from engine.data.sources.chat import ROLES
from engine.data.sources.files import find
from engine.data.sources.folder import FolderBlock, folder_blocks
from engine.data.sources.formats import FORMATS
from engine.data.sources.jsonl import JsonlBlock
from engine.data.sources.notes import notes
from engine.data.sources.source import Block, Document, Message
from engine.data.text_checks import RUN, longest_run_of_ids, suspicious
from engine.data.token_file import TokenFile
from engine.data.tokenizers.load import open_tokenizer
from engine.data.tokenizers.tokenizer import Tokenizer
from engine.data.workers import cores, in_processes
from engine.errors import DataError
from engine.units import Ints

_RECORDS = 1 << 16  # documents whose records a process holds
_BLOCK_BYTES = 16 << 20  # of a token file
_VARIABLE = re.compile(r"\b((?:byte|column|character|has|contains|id|token) |messages\[:?)-?[\d,]+")
Progress = Callable[[int, int], None]  # gets the blocks that are done, and all blocks
_open_tokenizer = cache(open_tokenizer)
_open_tokens = cache(TokenFile.open)  # which reads the whole index


class Check(NamedTuple):
    """A kind of fault."""

    refused: bool  # by training
    what: str
    advice: str


CHECKS: Mapping[str, Check] = {
    "L01": Check(True, "files that cannot be read to their end", "download or write the file again"),
    "L02": Check(True, "documents that cannot be used", "fix or remove them"),
    "L03": Check(True, "texts that are not valid UTF-8", "convert them to UTF-8, or remove them"),
    "L04": Check(True, "ids that the tokenizer does not have", "set data.tokenizer to the one that made the ids"),
    "L05": Check(True, "tokens beyond model.vocab", "set model.vocab to the tokenizer's vocabulary"),
    "L06": Check(False, "empty documents", "nothing, unless they should have text: they are left out"),
    "L07": Check(False, "documents of at most one token, BOS and EOS aside", "remove them: there is nothing to learn"),
    "L08": Check(
        False, "documents of which no token counts in the loss", "correct their masks or flags, or remove them"
    ),
    "L09": Check(False, "many replacement characters, U+FFFD", "convert the original texts again"),
    "L10": Check(False, "UTF-8 that was read in another encoding", "convert it back: text.encode('cp1252').decode()"),
    "L11": Check(False, "NUL characters", "remove them, or the documents if these are binary"),
    "L12": Check(False, "byte order marks, U+FEFF", "remove them: they are trained on"),
    "L13": Check(False, f"a character or an id {RUN:,} times in a row", "cut the run, or remove the documents"),
    "L14": Check(False, "copies of other documents", "remove them, unless they should count more than once"),
    "L15": Check(False, "documents longer than context", "raise context, unless they may be split into pieces"),
    "L16": Check(False, "documents longer than batch_tokens", "raise batch_tokens, or shorten them: each is a step"),
    "L17": Check(False, "chats with an empty message", "remove it, or the chat: an empty answer is trained on"),
    "L18": Check(False, "chats with an unknown role", "write user or assistant, unless the template knows it"),
}


class Limits(NamedTuple):
    """What training takes, in tokens."""

    context: int
    batch_tokens: int
    vocabulary: int


class Example(NamedTuple):
    """A document with a fault. `number` is its own in its block."""

    number: int
    place: str
    detail: str


@dataclass
class Finding:
    """Documents with one kind of fault, for one reason if there are several, with a few examples."""

    code: str
    reason: str
    hint: str
    count: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass
class Tally:
    """What was found in some blocks. Of each kind of fault, the first `keep` documents are examples."""

    keep: int
    documents: int = 0
    tokens: int = 0  # with BOS and EOS
    refused: int = 0  # documents and files with a fault that training refuses
    lengths: Counter[int] = field(default_factory=Counter)  # inputs of the documents that have any
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)

    def add(self, code: str, example: Example, problem: DataError | None = None) -> None:
        """Count a fault, with the error that reading the document raised."""
        hint = problem.problems[0].hint if problem is not None else None
        reason = _VARIABLE.sub(r"\1N", example.detail) if code == "L02" else ""
        self._count(Finding(code, reason, hint or CHECKS[code].advice, 1, [example]))

    def merge(self, other: Tally) -> None:
        """Add what was found in later blocks."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.refused += other.refused
        self.lengths.update(other.lengths)
        for finding in other.findings.values():
            self._count(finding)

    def _count(self, found: Finding) -> None:
        known = self.findings.setdefault((found.code, found.reason), Finding(found.code, found.reason, found.hint))
        known.count += found.count
        known.examples += found.examples[: max(0, self.keep - len(known.examples))]

    def lengths_found(self) -> dict[str, Any] | None:
        """Return the histogram of lengths; None if no document has an input."""
        sizes = np.array(sorted(self.lengths), dtype=np.int64)
        return histogram(sizes, np.array([self.lengths[size] for size in sizes.tolist()])) if len(sizes) else None


@dataclass(frozen=True)
class TokenBlock(Block):
    """Documents first .. last - 1 of a token file."""

    prefix: Path
    first: int
    last: int

    @property
    def files(self) -> list[str]:
        return [f"{self.prefix}.idx", f"{self.prefix}.bin"]

    @property
    def size(self) -> int:
        return int(_open_tokens(self.prefix).lengths(self.first, self.last).sum())

    def documents(self) -> Iterator[Document]:
        """Read each document. Raises DataError if the token file is damaged."""
        opened = _open_tokens(self.prefix)
        for number in range(self.first, self.last):
            yield Document(f"{self.prefix}:document {number}", None, opened.read(number, 0, opened.tokens))


def lint(
    sources: Sequence[schema.Data],
    limits: Limits,
    keep: int = 5,
    workers: int | None = None,
    progress: Progress = lambda done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> Tally:
    """Read all documents of all sources with `workers` processes, None for one per core, and return what was found.

    The result does not depend on the number of processes. `keep` examples of each finding are kept. `say` gets
    the lines of `notes` about each source. Raises DataError if a source has no files or
    is not what the config says, OSError if the temporary folder is full.
    """
    _open_tokens.cache_clear()  # files may have changed since an earlier call
    tally = Tally(keep)
    items = list[tuple[int, Block]]()
    for source, data in enumerate(sources):
        blocks = _blocks(data, tally)
        items += [(source, block) for block in blocks]
        for line in notes(data, blocks, limits.vocabulary):
            say(line)
    places = _Places([block for _, block in items])
    with TemporaryDirectory(prefix="bytescale-lint-") as folder:
        work = partial(_check_block, sources, limits, keep, Path(folder))
        numbered = [(number, *item) for number, item in enumerate(items)]
        hint = "use fewer processes with --workers, or close other programs"
        for number, found in enumerate(in_processes(work, numbered, workers or cores(), hint)):
            places.follow(found)
            for finding in found.findings.values():
                finding.examples = [places.exact(number, example) for example in finding.examples]
            tally.merge(found)
            progress(number + 1, len(items))
        copies = find_copies(Path(folder), keep)
    if copies.number:
        shown = [Example(0, places.of(copy), f"is a copy of {places.of(first)}") for copy, first in copies.examples]
        tally.findings["L14", ""] = Finding("L14", "", CHECKS["L14"].advice, copies.number, shown)
    tally.findings = {key: tally.findings[key] for key in sorted(tally.findings)}
    return tally


class _Places:
    """Names documents for people. Lines get their numbers from how many documents the blocks before them have."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._lines = list[int | None]()  # the number of the first line of each block, where it is known
        self._next: int | None = None  # that of the next one, if it is in the same file

    def follow(self, found: Tally) -> None:
        """Note what was found in the next block."""
        block = self._blocks[len(self._lines)]
        first = self._next
        if isinstance(block, JsonlBlock) and block.ranges[0][0] == 0:
            first = 1
        self._lines.append(first if isinstance(block, JsonlBlock) else None)
        whole = all(code != "L01" for code, _ in found.findings)
        self._next = first + found.documents if first is not None and whole else None

    def exact(self, number: int, example: Example) -> Example:
        """Return an example of block `number` with the number of its line, if it is one."""
        block, line = self._blocks[number], self._lines[number]
        if not isinstance(block, JsonlBlock) or line is None or example.place == block.path:
            return example
        return example._replace(place=f"{block.path}:{line + example.number}")

    def of(self, document: int) -> str:
        """Return the place of a document by the number in its record. May read its block again."""
        number, inside = document >> 32, document & 0xFFFFFFFF
        block, line = self._blocks[number], self._lines[number]
        if isinstance(block, JsonlBlock) and line is not None:
            return f"{block.path}:{line + inside}"
        return next(islice(_documents(block), inside, None))[0].place


def _blocks(data: schema.Data, tally: Tally) -> list[Block]:
    """List the blocks of a source. A file among several that cannot be listed is counted in `tally`.

    Raises DataError for a source of which there is nothing to read.
    """
    if data.format == "tokens":
        opened = _open_tokens(Path(data.paths[0]))
        parts = max(1, opened.tokens * opened.dtype.itemsize // _BLOCK_BYTES)
        bounds = [len(opened) * number // parts for number in range(parts + 1)]
        return [TokenBlock(opened.prefix, first, last) for first, last in pairwise(bounds) if last > first]
    if data.format == "folder":
        return folder_blocks(data, sized=False)  # a file that cannot be looked up is found when it is read
    try:
        return FORMATS[data.format].blocks(data)
    except DataError as error:
        files = arrow_files(data) if data.format == "arrow" else find(data)
        if len(files) < 2 or error.problems[0].key not in files:
            raise
    blocks = list[Block]()
    for path in files:
        try:
            blocks += FORMATS[data.format].blocks(data.model_copy(update={"path": path}))
        except DataError as error:
            tally.add("L01", Example(0, path, error.problems[0].message), error)
            tally.refused += 1
    return blocks


def _documents(block: Block) -> Iterator[tuple[Document, bool]]:
    """Read the documents of a block, and whether each has been read.

    A file that cannot be read any further makes a last one that has not; the other files of a folder are read.
    """
    try:
        for document in block.documents():
            yield document, True
    except DataError as error:
        yield Document(error.problems[0].key or block.files[0], None, problem=error), False
        if isinstance(block, FolderBlock) and error.problems[0].key in block.files:
            yield from _documents(block.after(error.problems[0].key))


def _check_block(
    sources: Sequence[schema.Data], limits: Limits, keep: int, folder: Path, item: tuple[int, int, Block]
) -> Tally:
    """Read the documents of a block, and write a record of each into `folder` to find copies.

    `item` is the number of the block, that of its source, and the block.
    """
    number, source, block = item
    data, tally, records = sources[source], Tally(keep), list[bytes]()
    tokenizer = None if data.format == "tokens" else _open_tokenizer(data.tokenizer, data.bos, data.eos)
    for index, (document, was_read) in enumerate(_documents(block)):
        tally.documents += was_read
        problem, ids = document.problem, np.empty(0, dtype=np.int64)
        if problem is None:
            try:
                ids, mask = _ids(document, tokenizer)
            except DataError as error:
                problem = error
        if problem is not None:
            code = "L03" if isinstance(problem.__cause__, UnicodeError) else "L02"
            found = [(code if was_read else "L01", problem.problems[0].message)]
        else:
            found = list(_faults(document, ids, mask, tokenizer, limits))
            tally.tokens += len(ids)
            if len(ids) > 1:
                tally.lengths[len(ids) - 1] += 1
            if len(ids):
                content = ids.astype("<i8").tobytes() if document.text is None else document.text
                records.append(record(content, number << 32 | index))
        for code, detail in found:
            tally.add(code, Example(index, document.place, detail), problem)
        tally.refused += any(CHECKS[code].refused for code, _ in found)
        if len(records) == _RECORDS:
            write_records(folder, records)
            records.clear()
    write_records(folder, records)
    return tally


def _ids(document: Document, tokenizer: Tokenizer | None) -> tuple[Ints, NDArray[np.bool_] | None]:
    """Return the ids of a document with BOS and EOS, [n], none for an empty text, and which count; None: all.

    Raises DataError as `encode` does, but not for ids that the tokenizer does not have.
    """
    if document.ids is not None:
        return document.ids, document.mask
    assert tokenizer is not None
    ids, mask = encode(document, tokenizer)
    return ids.astype(np.int64, copy=False), mask


def _faults(
    document: Document, ids: Ints, mask: NDArray[np.bool_] | None, tokenizer: Tokenizer | None, limits: Limits
) -> Iterator[tuple[str, str]]:
    """Yield the code and the details of each fault of a document with `ids` [n], of which those in `mask` count."""
    bos, eos = (None, None) if tokenizer is None else (tokenizer.bos, tokenizer.eos)
    start = int(bos is not None and ids[:1].tolist() == [bos])
    count = len(ids) - start - int(eos is not None and ids[start:][-1:].tolist() == [eos])
    if not len(ids):
        yield "L06", "is empty"
        return
    if count < 2:
        yield "L07", f"has only the token {ids[start]}" if count else "has only BOS and EOS"
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or (tokenizer is not None and most >= tokenizer.vocabulary):
        size = "" if tokenizer is None else f"; {tokenizer.kind} has a vocabulary of {tokenizer.vocabulary:,}"
        yield "L04", f"has token {least if least < 0 else most}{size}"
    elif most >= limits.vocabulary:
        yield "L05", f"has token {most}; model.vocab is {limits.vocabulary}"
    if mask is not None and len(ids) > 1 and not mask[1:].any():  # the first id is no label
        yield "L08", "has no token that counts after the first one"
    if document.messages is not None:
        yield from _faults_of_chat(document.messages)
    elif document.text is None:
        run, at = longest_run_of_ids(ids)
        if run >= RUN:
            yield "L13", f"repeats the id {ids[at]} {run:,} times from id {at} on"
    else:
        with suppress(UnicodeDecodeError):  # data.encoding=bytes: what other bytes mean is not known
            yield from suspicious(document.text.decode("utf-8"))
    if len(ids) - 1 > limits.context:
        yield "L15", f"has {len(ids) - 1:,} tokens; context is {limits.context:,}"
    if len(ids) - 1 > limits.batch_tokens:
        yield "L16", f"has {len(ids) - 1:,} tokens; batch_tokens is {limits.batch_tokens:,}"


def _faults_of_chat(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield the code and the details of each fault in what is said, of each kind the first."""
    found = dict[str, str]()
    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content", "")
        if role not in ROLES:
            found.setdefault("L18", f"messages[{number}] has the role {role!r}")
        # Empty system prompts and results of tools are usual.
        if role in ("user", "assistant") and not content.strip() and "tool_calls" not in message:
            found.setdefault("L17", f"messages[{number}], of the {role}, is empty")
        for code, detail in suspicious(content):
            found.setdefault(code, f"messages[{number}] {detail}")
    yield from found.items()
