"""Where the documents of a run are in the user's files, and which document is at a place.

A document of a run is known by its source, its block, and its number among those of the block that can be trained on.
Its place is a path, `path:LINE`, `path:row NUMBER`, or, in a token file, `PREFIX:document NUMBER`.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.data.corpus import Corpus, TextCorpus, TokenCorpus
from engine.data.parts import LeftOut
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Block
from engine.errors import DataError


class Known(NamedTuple):
    """A document as the ledger knows it."""

    source: str
    block: int
    document: int
    hash: int  # of its content

    @property
    def id(self) -> str:
        return f"{self.source}:{self.block}:{self.document}"

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, with the hash in hexadecimal digits: numbers of JSON have 53 bits."""
        return {"id": self.id, **self._asdict(), "hash": f"{self.hash:016x}"}


class Place(NamedTuple):
    """Where a document is. `place` is None if it cannot be found. `problem` is the reason, or that it has changed."""

    place: str | None
    problem: str | None = None


class Match(NamedTuple):
    """A document at a place, or all of a block if `document` is None."""

    source: str
    block: int
    document: int | None


def places_of(corpora: Sequence[Corpus], documents: Iterable[Known]) -> dict[Known, Place]:
    """Find documents. Blocks of texts that are no longer in the cache folder are packed again.

    Each block is read once, and each file of lines up to the last one that is needed. Raises StorageError if a block
    cannot be packed.
    """
    named, found = {corpus.name: corpus for corpus in corpora}, dict[Known, Place]()
    blocks = defaultdict[tuple[str, int], list[Known]](list)
    for document in documents:
        blocks[document.source, document.block].append(document)
    placed = defaultdict[tuple[str, ...], list[tuple[Block, Known]]](list)  # by the files of their blocks
    for (source, number), wanted in blocks.items():
        corpus = named.get(source)
        if corpus is None:
            found |= dict.fromkeys(wanted, Place(None, f"the config of the run no longer has the source {source!r}"))
            continue
        try:
            found |= _in_block(corpus, number, wanted)
        except DataError as error:
            (problem,) = error.problems
            found |= dict.fromkeys(wanted, Place(None, f"{problem.key}: {problem.message}"))
            continue
        there = [one for one in wanted if found[one].place is not None]
        if there and isinstance(corpus, TextCorpus):
            block = corpus.texts.blocks[number]
            placed[tuple(block.files)] += [(block, one) for one in there]
    for of_files in placed.values():
        names = of_files[0][0].named({found[one].place or "" for _, one in of_files})
        found |= {one: found[one]._replace(place=names[found[one].place or ""]) for _, one in of_files}
    return found


def _in_block(corpus: Corpus, number: int, wanted: Sequence[Known]) -> dict[Known, Place]:
    """Return the places of documents of a block; those of lines have an offset in place of a number."""
    gone, changed = "its files have changed: they have no such document", "its content has changed since the step"
    if number >= corpus.blocks:
        return dict.fromkeys(wanted, Place(None, gone))
    lengths = corpus.lengths(number)
    hashes = lengths.hash().tolist()
    if isinstance(corpus, TextCorpus):
        assert lengths.left_out is not None
        all_places = [document.place for document in corpus.texts.blocks[number].documents()]
        places = [all_places[ordinal] for ordinal in lengths.left_out.numbers(len(hashes)).tolist()]
    else:
        _, first = corpus.token_file(number, 0)
        places = [f"{corpus.place}:document {first + document}" for document in range(len(hashes))]
    found = dict[Known, Place]()
    for one in wanted:
        if one.document >= len(places):
            found[one] = Place(None, gone)
        else:
            found[one] = Place(places[one.document], None if hashes[one.document] == one.hash else changed)
    return found


def at_place(corpora: Sequence[Corpus], place: str) -> tuple[list[Match], str | None]:
    """Find the documents at a place, which may be a whole file. Also returns why a document there is in no step.

    Finds nothing at a place without a document. Raises DataError if a file cannot be read, StorageError if a block
    cannot be packed.
    """
    found, reason = list[Match](), None
    for corpus in corpora:
        if isinstance(corpus, TokenCorpus):
            document = re.fullmatch(re.escape(corpus.place) + r":document (\d+)", place)
            match = corpus.find(int(document[1])) if document else None
            if match is not None:
                found.append(Match(corpus.name, *match))
                reason = _not_trained(corpus, *match)
        elif isinstance(corpus, TextCorpus):
            for block, ordinal in _ordinals(corpus.texts.blocks, place):
                if ordinal is None:
                    found.append(Match(corpus.name, block, None))
                    continue
                lengths = corpus.lengths(block)
                assert lengths.left_out is not None
                reason = _left_out(lengths.left_out, ordinal)
                if reason is None:
                    kept = lengths.left_out.numbers(len(lengths))
                    pieces = range(*(int(np.searchsorted(kept, ordinal, side)) for side in ("left", "right")))
                    found += (Match(corpus.name, block, piece) for piece in pieces)
                    reasons = [_not_trained(corpus, block, piece) for piece in pieces]
                    reason = reasons[0] if all(reasons) else None
    return found, reason


def _left_out(left_out: LeftOut, ordinal: int) -> str | None:
    """Return why a document of a block is not in its token file."""
    if ordinal in left_out.empty:
        return "it has no token to predict"
    if (ordinal, 0) in left_out.pieces:
        return "the transform of its source leaves it out"
    broken = (one.reason for one in left_out.broken if one.document == ordinal)
    return next((f"it cannot be used: {reason}" for reason in broken), None)


def _not_trained(corpus: Corpus, block: int, document: int) -> str | None:
    """Return why a document of a token file is not trained on."""
    lengths = corpus.lengths(block)
    if not lengths.inputs()[document]:
        return "it has no token to predict"
    return "it is held out for validation" if lengths.hash()[document] / 2.0**64 < corpus.share else None


def _ordinals(blocks: Sequence[Block], place: str) -> Iterator[tuple[int, int | None]]:
    """Yield the block and the number, among all documents of the block, of each document at a place.

    None instead of the number means all documents of the block: the place is a file with several documents.
    """
    forms = "|".join(form.inside for form in FORMATS.values() if form.inside)
    inside, wanted = (
        re.search(rf":({forms})$", place),
        dict[str, str | None](),
    )  # the place in each file, as blocks name it
    path = place[: inside.start()] if inside else place
    for number, block in enumerate(blocks):
        for file in block.files:
            if _same(file, place):
                if len(block.files) == 1:
                    yield number, None
                else:
                    yield from ((number, at) for at in block.in_file(file))
            elif inside and _same(file, path):
                if file not in wanted:
                    wanted[file] = block.located(file, inside[0])
                there = wanted[file]
                if there is not None and block.has(there):
                    documents = enumerate(block.documents())
                    yield from ((number, ordinal) for ordinal, one in documents if one.place == there)


def _same(file: str, path: str) -> bool:
    """Return whether two paths are of the same file. Only those with the same name are looked up."""
    return file == path or (Path(file).name == Path(path).name and os.path.realpath(file) == os.path.realpath(path))
