"""Reads all documents of a config and finds faults: those that training rejects, and those that it would learn.

Documents are looked at as training gets them, after the `transform` of their source.

Memory is bounded: a process holds a part of a block (docs/data.md) and one document with its tokens at a time, and
records of 64K documents; the caller holds a few examples of each fault, how often each length occurs (at most
sqrt(2 x tokens) lengths), and up to 4M documents' records when it looks for copies (copies.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.config import schema
from engine.data.lint.copies import find_copies, record, write_records
from engine.data.lint.faults import Limits, faults, trained_on
from engine.data.lint.findings import CHECKS, Example, Finding, Tally
from engine.data.lint.reading import blocks_of, documents_of, open_tokens
from engine.data.sources.notes import notes, nothing_to_train
from engine.data.sources.source import Block
from engine.data.tokenizers.load import open_tokenizer
from engine.data.workers import cores, in_processes
from engine.errors import DataError

_RECORDS = 1 << 16  # documents whose records a process holds
Progress = Callable[[int, int], None]  # gets the blocks that are done, and all blocks
_open_tokenizer = cache(open_tokenizer)


def lint(
    sources: Sequence[schema.Data],
    limits: Limits,
    keep: int = 5,
    workers: int | None = None,
    progress: Progress = lambda done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Tally, list[Tally | DataError]]:
    """Read all documents of all sources with `workers` processes, None for one per core.

    Returns the findings, and for each source its own or, if it has no document to train on, the error of training. The
    result does not depend on the number of processes. `keep` examples of each finding are kept. `say` gets the
    lines of `notes` about each source. Raises DataError if a source has no files or another format than the config
    names, OSError if the temporary folder is full.
    """
    open_tokens.cache_clear()  # files may have changed since an earlier call
    # A file among several that cannot be listed is a finding, not an error, so the others are still read.
    tally, own = Tally(keep), [Tally(0) for _ in sources]
    items = list[tuple[int, Block]]()
    for source, data in enumerate(sources):
        blocks = blocks_of(data, tally)
        items += [(source, block) for block in blocks]
        for line in notes(data, blocks, limits.vocabulary):
            say(line)
    places = _Places([block for _, block in items])
    with TemporaryDirectory(prefix="bytescale-lint-") as folder:
        work = partial(_check_block, sources, limits, keep, Path(folder))
        numbered = [(number, *item) for number, item in enumerate(items)]
        hint = "use fewer processes with --workers, or close other programs"
        # Results arrive in the order of the blocks, so the examples that are kept do not depend on the number of
        # processes.
        for number, found in enumerate(in_processes(work, numbered, workers or cores(), hint)):
            places.follow(found)
            for finding in found.findings.values():
                finding.examples = [places.exact(number, example) for example in finding.examples]
            tally.merge(found)
            own[items[number][0]].merge(found)
            progress(number + 1, len(items))
        # Copies are known only when all documents have been read: by sorting the records on disk, since their hashes
        # may exceed the memory.
        copies = find_copies(Path(folder), keep)
    if copies.number:
        shown = [Example(0, places.of(copy), f"is a copy of {places.of(first)}") for copy, first in copies.examples]
        tally.findings["L14", ""] = Finding("L14", "", CHECKS["L14"].advice, copies.number, shown)
    tally.findings = {key: tally.findings[key] for key in sorted(tally.findings)}
    of_sources = list[Tally | DataError](own)
    for number, one in enumerate(own):
        if not one.lengths:
            read = [block for source, block in items if source == number]
            empty = one.documents - one.refused
            of_sources[number] = nothing_to_train(sources[number].place, read, empty, one.refused, one.dropped)
    return tally, of_sources


class _Places:
    """Names documents for people. Lines get their numbers from how many documents the blocks before them have."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._before = list[int | None]()  # documents of its file before each block, where it is known
        self._next: int | None = None  # those before the next one, if it is in the same file

    def follow(self, found: Tally) -> None:
        """Record the findings of the next block."""
        block = self._blocks[len(self._before)]
        before = self._next if block.continues else 0
        self._before.append(before)
        whole = all(code != "L01" for code, _ in found.findings)
        self._next = before + found.documents if before is not None and whole else None

    def exact(self, number: int, example: Example) -> Example:
        """Return an example of block `number` with the number of its line, if it is one, not a whole file."""
        place = None if example.place in self._blocks[number].files else self._place(number, example.number)
        return example if place is None else example._replace(place=place)

    def of(self, document: int) -> str:
        """Return the place of a document by the number in its record. May read its block again."""
        number, inside = document >> 32, document & 0xFFFFFFFF
        return self._place(number, inside) or next(islice(documents_of(self._blocks[number]), inside, None))[0].place

    def _place(self, number: int, inside: int) -> str | None:
        """Return the place of document `inside` of block `number`, where it follows from the documents before it."""
        before = self._before[number]
        return None if before is None else self._blocks[number].place_of(inside, before)


def _check_block(
    sources: Sequence[schema.Data], limits: Limits, keep: int, folder: Path, item: tuple[int, int, Block]
) -> Tally:
    """Read the documents of a block, and write a record of each into `folder` to find copies.

    `item` is the number of the block, that of its source, and the block.
    """
    number, source, block = item
    data, tally, records = sources[source], Tally(keep), list[bytes]()
    tokenizer = None if data.format == "tokens" else _open_tokenizer(data.tokenizer, data.bos, data.eos)
    for index, (document, was_read) in enumerate(documents_of(block)):
        tally.documents += was_read
        # A document that training rejects counts with its reason. Only documents with ids are checked for other faults.
        try:
            found, dropped, changed = trained_on(document, block.transform, tokenizer)
        except DataError as error:
            code = "L03" if isinstance(error.__cause__, UnicodeError) else "L02"
            code = code if was_read else "L01"
            tally.add(code, Example(index, document.place, error.problems[0].message), error)
            tally.refused += 1
            continue
        tally.changed.update(changed)
        tally.dropped += dropped
        refused = False
        for one in found:
            text, ids, mask = one.document.text, one.ids, one.mask
            tally.tokens += len(ids)
            if len(ids) > 1 and (mask is None or mask[1:].any()):
                tally.lengths[len(ids) - 1] += 1
            if len(ids):
                content = ids.astype("<i8").tobytes() if text is None else text
                records.append(record(content, number << 32 | index))
            for code, detail in faults(one, tokenizer, limits):
                tally.add(code, Example(index, document.place, detail))
                refused = refused or CHECKS[code].refused
        tally.refused += refused
        # In portions, because a block may have millions of documents.
        if len(records) >= _RECORDS:
            write_records(folder, records)
            records.clear()
    write_records(folder, records)
    return tally
