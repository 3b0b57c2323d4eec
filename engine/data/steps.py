"""Assigns documents to steps and splits them into sequences, independently of the number of ranks.

Letters: S sequences of a step, N documents.

```
 epoch's order   d7 ------  d2 ---  d9 --------------  d1 --  | d4 ...
 steps           [ 0             ][ 1                     ][ 2        a step may cross into the next epoch
 context         |      |   |   |   |      |      |  |  |  |    documents longer than the context are split into pieces
```
With several sources, each has a separate order, and the mixture chooses the source of the next document.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.config.schema import Config
from engine.config.sources import source_configs
from engine.data.blocks.blocks import BlockId, masked_within
from engine.data.corpus import Corpus, TextCorpus, chosen_lengths
from engine.data.mixture import SCALE, Mixer, segment_at, segments_of, weights_at
from engine.data.order import Documents, Window, window, window_blocks
from engine.data.permute import Permutation
from engine.data.quarantine import Unusable
from engine.data.sources.notes import nothing_to_train
from engine.errors import DataError
from engine.units import Ints

_POOL = 4  # validation documents are chosen from this many times the inputs of the validation set
TOKEN_BYTES = 4  # of text, about
_SEARCHED = 16  # windows in which validation documents are looked for
_WINDOWS = 2  # that are kept for each source


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """The sequences of a step. Each consists of inputs start .. start + length - 1 of a document; input 0 is BOS."""

    source: Ints  # [S] number of the corpus
    block: Ints  # [S] number of the block in the corpus
    document: Ints  # [S] number of the document in the block
    start: Ints  # [S] first input of the sequence in its document
    length: Ints  # [S] number of inputs
    loss_tokens: Ints  # [S] number of labels that are not ignored
    hash: NDArray[np.uint64]  # [S] of the content of the document; in another tool's token file, of its number

    def __len__(self) -> int:
        return len(self.document)

    def chosen(self, sequences: Ints | slice) -> SequenceTable:
        """Return the table of some sequences."""
        return SequenceTable(*(getattr(self, column.name)[sequences] for column in fields(self)))


class Part(NamedTuple):
    """Inputs start .. start + length - 1 of a document, which belong to one step."""

    source: int
    block: int
    document: int
    start: int
    length: int
    hash: int  # of the whole document


class Place(NamedTuple):
    """How far a source has been used: the place of its next document in its order."""

    epoch: int = 0
    window: int = 0  # blocks of the epoch before the present window
    document: int = 0  # documents of the window that have been taken
    start: int = 0  # inputs of the next document that have been taken, if it is split between steps


@dataclass(frozen=True)
class Cursor:
    """Where the next step begins. It does not depend on ranks."""

    step: int = 0  # steps before
    tokens: int = 0  # inputs before
    places: Mapping[str, Place] = field(default_factory=dict)  # by the name of the source; others are at their begin
    mixer: Mapping[str, Any] | None = None  # state of the Mixer

    def to_json(self) -> dict[str, Any]:
        """Return the cursor as plain data."""
        places = {name: list(place) for name, place in self.places.items()}
        return {"step": self.step, "tokens": self.tokens, "places": places, "mixer": self.mixer}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Cursor:
        """Return the cursor that `to_json` returned as plain data."""
        places = {name: Place(*place) for name, place in found["places"].items()}
        return cls(found["step"], found["tokens"], places, found["mixer"])


def piece_bounds(lengths: Ints, context: int) -> tuple[Ints, Ints, Ints]:
    """Split documents of `lengths` [N] inputs into pieces of at most `context` inputs.

    Returns, for each piece, the index of its document, its start in the document, and its length: three int64 [S].
    For example, a document of 10 inputs and a context of 4 give pieces with starts 0, 4, 8 and lengths 4, 4, 2.
    """
    pieces = -(-lengths // context)
    owner = np.repeat(np.arange(len(lengths), dtype=np.int64), pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)  # index of the first piece of the same document
    start = (np.arange(len(owner), dtype=np.int64) - first) * context
    return owner, start, np.minimum(context, lengths[owner] - start)


def fitting(lengths: Ints, tokens: int) -> int:
    """Return how many of `lengths` [N], taken in order, have a sum of at most `tokens`; at least 1."""
    return max(1, int(np.searchsorted(np.cumsum(lengths), tokens, side="right")))


class Steps:
    """The sequences of each step and of the validation set: a pure function of documents, config and cursor.

    Only blocks of the windows that are needed are opened; the lengths of the last windows are kept. `unusable` are the
    documents that were left out of these blocks, each once; the caller that lists them empties it.
    """

    def __init__(self, corpora: Sequence[Corpus], config: Config) -> None:
        self.corpora = corpora
        self._config = config
        self._segments = segments_of(config.data)
        self._exhausted = {name: one.exhausted for name, one in source_configs(config.data).items()}
        self._number = {corpus.name: number for number, corpus in enumerate(corpora)}
        self.unusable, self._noted = list[Unusable](), set[BlockId]()
        self._window = lru_cache(_WINDOWS * len(corpora))(self._load)

    def next(self, cursor: Cursor) -> tuple[SequenceTable, Cursor] | None:
        """Return the sequences of the step at a cursor, and the cursor of the next step.

        A step takes documents until the next one would exceed `batch_tokens` inputs; it may continue with documents of
        the next epoch. A longer document forms a step alone, or, with `data.long=split`, its pieces of at most
        `context` inputs are distributed over steps. Returns None if the run ends there, see `ended`. Raises DataError
        if a source has no document to train on.
        """
        batch, parts, tokens = self._config.batch_tokens, list[Part](), 0
        places, mixer = dict(cursor.places), self._mixer(cursor)
        # Drawing takes nothing: places and mixer change only for a document that fits, so the next step draws the same
        # one again.
        while (drawn := self._draw(mixer, places)) is not None:
            name, part, after = drawn
            if parts and tokens + part.length > batch:
                break
            parts.append(part)
            tokens += part.length
            places[name] = after
            mixer.took(name, part.length)
        if not parts:
            return None
        return self._cut(parts), Cursor(cursor.step + 1, cursor.tokens + tokens, places, mixer.state)

    def ended(self, cursor: Cursor) -> str | None:
        """Return why there is no step at a cursor and how to continue; None if there is one.

        A run ends when a source has been used up and `data.exhausted` is `stop`, or when all sources that have a weight
        at the step have been dropped, whatever later segments of `data.mix` have.
        """
        if all(policy == "repeat" for policy in self._exhausted.values()):
            return None
        mixer = self._mixer(cursor)
        if self._draw(mixer, cursor.places) is not None:
            return None
        stops = mixer.choose()
        weights = weights_at(self._segments, cursor.step, cursor.tokens)
        used = [name for name, weight in weights.items() if weight] if stops is None else [stops]
        what = (
            f"all documents of {', '.join(used)} were used" if self._config.data.sources else "all documents were used"
        )
        again = " ".join(f"{key}=repeat" for key in dict.fromkeys(map(self._policy_key, used)))
        present = segment_at(self._segments, cursor.step, cursor.tokens)
        later = [*chain(*(segment.weights.items() for segment in self._segments[present + 1 :]))]
        others = [name for name, weight in later if weight and name not in mixer.dropped]
        if stops is not None or not others:
            return f"{what}; set {again} to use them again"
        start = f"{self._segments[present].unit.removesuffix('s')} {self._segments[present].start}"
        return (
            f"{what}, and the segment of data.mix from {start} on has no other source; "
            f"give {', '.join(dict.fromkeys(others))} a weight there to continue, or set {again}"
        )

    def validation(self) -> dict[str, SequenceTable]:
        """Return the validation set of each source: pieces of documents, until the next would exceed its inputs.

        The sources divide `data.validation_tokens` equally; the set of a source without a weight consists of
        any of its documents. The pieces are shuffled, in the same way in every run, so that a small set covers many
        documents: they are from the first windows of a random order that have together four times as many inputs, or
        from the first 16 windows. A set has at least one piece; sources without validation documents have none.
        """
        corpora = self._validated()
        tokens = self._config.data.validation_tokens // max(1, len(corpora))
        tables = {corpus.name: self._pieces(corpus, tokens) for corpus in corpora if tokens}
        return {name: table for name, table in tables.items() if len(table)}

    def upcoming(self, cursor: Cursor, ahead: int) -> Iterator[BlockId]:
        """Yield the blocks that the next steps open: of each source, of its window at `cursor` and the next ones.

        The next windows of all sources have together at least `ahead` bytes, divided by the weights of the sources, or
        are as many as a source has. Windows are in the order in which they are needed if sources are used equally fast.
        Nothing is opened.
        """
        waiting = deque[tuple[str, Place, int, int]]()
        for name, weight in self._mixer(cursor).weights.items():
            place = cursor.places.get(name, Place())
            corpus = self.corpora[self._number[name]]
            if corpus.share == 1:
                continue
            blocks = window_blocks(corpus, self._key(name, place.epoch), place.window)
            left = -(-ahead * weight // SCALE) + sum(map(corpus.size, blocks))
            waiting.append((name, place, left, 0))
        # One window of each source in turn, until its share of `ahead` is used up.
        while waiting:
            name, place, left, count = waiting.popleft()
            corpus = self.corpora[self._number[name]]
            blocks = window_blocks(corpus, self._key(name, place.epoch), place.window)
            yield from (BlockId(name, block) for block in blocks)
            left, count = left - sum(map(corpus.size, blocks)), count + len(blocks)
            place = Place(place.epoch, place.window + len(blocks))
            if place.window == corpus.blocks:
                place = Place(place.epoch + 1)
            wanted = left > 0 and count < corpus.blocks  # a small source would have thousands of epochs
            if wanted and (place.epoch == 0 or self._exhausted[name] == "repeat"):
                waiting.append((name, place, left, count))

    def validating(self) -> Iterator[BlockId]:
        """Yield the blocks from which the validation documents of each source are chosen, if tokens have 4 bytes."""
        corpora = self._validated()
        tokens = self._config.data.validation_tokens // max(1, len(corpora))
        for corpus in corpora:
            place, left = 0, _POOL * tokens * TOKEN_BYTES / corpus.share
            for _ in range(_SEARCHED):
                blocks = window_blocks(corpus, f"validation, {corpus.name}", place)
                yield from (BlockId(corpus.name, block) for block in blocks)
                place, left = place + len(blocks), left - sum(map(corpus.size, blocks))
                if left <= 0 or place == corpus.blocks:
                    break

    def _validated(self) -> list[Corpus]:
        return [corpus for corpus in self.corpora if corpus.share and self._config.data.validation_tokens]

    def _pieces(self, corpus: Corpus, tokens: int) -> SequenceTable:
        """Return a validation set of about `tokens` inputs."""
        key, place, parts, found = f"validation, {corpus.name}", 0, list[Part](), 0
        for _ in range(_SEARCHED):
            documents = window(corpus, key, place)
            self._note(documents)
            for block, document, inputs, content in zip(*map(np.ndarray.tolist, documents.validated), strict=True):
                parts.append(Part(self._number[corpus.name], block, document, 0, inputs, content))
                found += inputs
            place += documents.blocks
            if found >= _POOL * tokens or place == corpus.blocks:
                break
        table = self._cut(parts)
        order = Permutation(len(table), key)(np.arange(len(table)))
        return table.chosen(order[: fitting(table.length[order], tokens) if len(order) else 0])

    def _policy_key(self, name: str) -> str:
        """Return the key that decides what happens when a source has been used up."""
        source = self._config.data.sources.get(name)
        return f"data.sources.{name}.exhausted" if source and source.exhausted else "data.exhausted"

    def _draw(self, mixer: Mixer, places: Mapping[str, Place]) -> tuple[str, Part, Place] | None:
        """Return the source of the next document, what it gives, and its next place; None if the run ends here.

        Sources that have been used up are dropped from the mixer if `data.exhausted` is `drop`.
        """
        while (name := mixer.choose()) is not None:
            if (found := self._at(name, places.get(name, Place()))) is not None:
                return name, *found
            if self._exhausted[name] == "stop":
                return None
            mixer.drop(name)
        return None

    def _mixer(self, cursor: Cursor) -> Mixer:
        """Return what chooses the sources of the step at a cursor. Only sources of the present config remain."""
        weights = weights_at(self._segments, cursor.step, cursor.tokens)
        gone = sorted({*cursor.mixer["sources"]} - {*weights}) if cursor.mixer else []
        mixer = Mixer([*weights, *gone], cursor.mixer)
        # A resumed run may set a source that was dropped to repeat its documents.
        mixer.dropped -= {name for name in mixer.dropped if self._exhausted.get(name) == "repeat"}
        mixer.weights = {**dict.fromkeys(gone, 0), **weights}
        for name in gone:
            mixer.forget(name)
        return mixer

    def _key(self, name: str, epoch: int) -> str:
        return f"seed {self._config.run.seed}, source {name}, epoch {epoch}"

    def _load(self, name: str, epoch: int, place: int) -> tuple[Documents, int]:
        """Return the documents to train on of a window, and its number of blocks."""
        found = window(self.corpora[self._number[name]], self._key(name, epoch), place)
        self._note(found)
        return found.trained, found.blocks

    def _note(self, found: Window) -> None:
        """Record the documents that were left out of the blocks of a window. Most blocks occur again in each epoch."""
        new = [one for one in found.unusable if (one.source, one.block) not in self._noted]
        self._noted |= {BlockId(one.source, one.block) for one in new}
        self.unusable += new

    def _at(self, name: str, place: Place) -> tuple[Part, Place] | None:
        """Return what a source gives at a place, and its next place; None if it has been used up."""
        corpus, begin = self.corpora[self._number[name]], place
        # Skips windows without documents to train on. A whole epoch of them is an error.
        while place.epoch == 0 or self._exhausted[name] == "repeat":
            documents, blocks = self._window(name, place.epoch, place.window)
            if place.document < len(documents.inputs):
                block, document, inputs, content = (column.item(place.document) for column in documents)
                length = inputs - place.start
                if length > self._config.batch_tokens and self._config.data.long == "split":
                    length = min(length, self._config.context)
                part = Part(self._number[name], block, document, place.start, length, content)
                if place.start + length < inputs:
                    return part, place._replace(start=place.start + length)
                return part, place._replace(document=place.document + 1, start=0)
            place = Place(place.epoch, place.window + blocks)
            if place.window == corpus.blocks:
                if place.epoch > begin.epoch or begin == Place():  # a whole epoch has gone by
                    raise no_documents(corpus)
                place = Place(place.epoch + 1)
        return None

    def _cut(self, parts: Sequence[Part]) -> SequenceTable:
        """Split parts of documents into sequences of at most `context` inputs.

        Every input is in exactly one sequence, and its label is the next token of the document. Positions start at 0 in
        each sequence.
        """
        columns = np.array([part[:-1] for part in parts], dtype=np.int64).reshape(-1, len(Part._fields) - 1).T
        source, block, document, begin, inputs = columns
        contents = np.array([part.hash for part in parts], dtype=np.uint64)  # not below 2^63, as int64 are
        owner, start, length = piece_bounds(inputs, self._config.context)
        start += begin[owner]
        table = SequenceTable(source[owner], block[owner], document[owner], start, length, length, contents[owner])
        return replace(table, loss_tokens=self._loss_tokens(table))

    def _loss_tokens(self, table: SequenceTable) -> Ints:
        """Return how many labels of each sequence count in the loss, int64 [S]."""
        counted: Ints = table.length.copy()
        columns = (table.source, table.block, table.document, table.hash)
        known, runs = tuple[int, ...](), counted
        for sequence, place in enumerate(zip(*map(np.ndarray.tolist, columns), strict=True)):
            if place != known:  # the pieces of a document follow each other
                source, block, document, content = known = place
                runs = chosen_lengths(self.corpora[source], block, document, content).masked(document)
            if len(runs):
                start = int(table.start[sequence]) + 1  # the label of an input is the next token
                counted[sequence] -= masked_within(runs, start, start + int(table.length[sequence]))
        return counted


def no_documents(corpus: Corpus) -> DataError:
    """Create the DataError for a source without any document to train on. Looks for the first that is not empty."""
    documents = empty = broken = 0
    for block in range(corpus.blocks):
        lengths = corpus.lengths(block)
        inputs, left_out = lengths.inputs(), lengths.left_out
        documents += len(inputs)
        if left_out is not None:
            empty, broken = empty + len(left_out.empty), broken + len(left_out.broken)
        if corpus.share and (inputs > 0).any():
            message = f"every document of {corpus.place} is used for validation, none for training"
            return DataError(message, key="data.validation_share", hint="lower it; 0 trains on every document")
    blocks = corpus.texts.blocks if isinstance(corpus, TextCorpus) else ()
    return nothing_to_train(corpus.place, blocks, empty + documents, broken)
