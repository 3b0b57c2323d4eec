"""Assigns documents to steps, and cuts them into sequences (sequences.py), independently of the number of ranks.

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
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from engine.config.schema import Config
from engine.config.sources import of_source, source_configs
from engine.data.blocks.blocks import BlockId
from engine.data.corpus import Corpus, TextCorpus, TokenCorpus
from engine.data.mixture import (
    ANY,
    SCALE,
    LengthRange,
    Mixer,
    Segment,
    longest_document,
    segment_at,
    segments_of,
    weights_at,
)
from engine.data.order import OF_NEW_RUN, Documents, Window, order_of_new, window, window_blocks
from engine.data.permute import Permutation
from engine.data.quarantine import Unusable
from engine.data.sequences import SequenceTable, fitting, sequences_of
from engine.data.sources.notes import nothing_to_train
from engine.data.tokenizers.load import BYTES
from engine.data.walk import Place, Waiting, Walk, never_taken, none_of_lengths
from engine.errors import DataError

if TYPE_CHECKING:
    from engine.data.draws import Draws

AHEAD_STEPS = 4  # whose blocks are packed ahead
# In which an announced rise of a weight is seen: a window of slow blocks may take longer than AHEAD_STEPS.
RISE_STEPS = 16
_POOL = 4  # validation documents are chosen from this many times the inputs of the validation set
_TOKEN_BYTES = 4  # of text, about, unless tokens are bytes
_SEARCHED = 16  # windows in which validation documents are looked for
_WINDOWS = 2  # that are kept for each source
_COUNTED = 16  # of each source whose number of documents is kept


@dataclass(frozen=True)
class Cursor:
    """Where the next step begins. It does not depend on ranks."""

    step: int = 0  # steps before
    tokens: int = 0  # inputs before
    places: Mapping[str, Place] = field(default_factory=dict)  # by the name of the source; others are at their begin
    mixer: Mapping[str, Any] | None = None  # state of the Mixer
    order: int = OF_NEW_RUN  # number of the order of documents (order.py), which a run keeps from its first step on
    # Documents before the places, by the name of the source: those of other lengths than the segment's (walk.py)
    waiting: Mapping[str, Sequence[Waiting]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the cursor as plain data."""
        places = {name: list(place) for name, place in self.places.items()}
        found = vars(self) | {"places": places}
        if not found.pop("waiting"):  # of a run whose segments have no lengths
            return found
        waiting = {
            name: [[*one[:2], list(one.place), one.documents] for one in some] for name, some in self.waiting.items()
        }
        return found | {"waiting": waiting}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Cursor:
        """Return the cursor that `to_json` returned as plain data. Earlier versions had order 1 and no number."""
        places = {name: Place(*place) for name, place in found["places"].items()}
        waiting = {name: tuple(map(Waiting.of_json, some)) for name, some in found.get("waiting", {}).items()}
        return cls(found["step"], found["tokens"], places, found["mixer"], found.get("order", 1), waiting)


class WindowAhead(NamedTuple):
    """A window that coming steps need."""

    blocks: list[BlockId]  # of one source
    tokens: float  # about
    used: float  # share of its documents that steps have taken; 1 if that is not known


class Steps:
    """The sequences of each step and of the validation set: a pure function of documents, config and cursor.

    Only blocks of the windows that are needed are opened; the lengths of the last windows are kept. `unusable` are the
    documents that were left out of these blocks, each once, and `dropped` how many transforms left out of each block;
    the caller that takes them empties both.
    """

    def __init__(self, corpora: Sequence[Corpus], config: Config) -> None:
        self.corpora = corpora
        self._config, self.batch_tokens = config, config.batch_tokens
        self._segments = segments_of(config.data)
        self._lengths = [segment.lengths for segment in self._segments]
        self._exhausted = {name: one.exhausted for name, one in source_configs(config.data).items()}
        self._number = {corpus.name: number for number, corpus in enumerate(corpora)}
        self.unusable, self._noted = list[Unusable](), set[BlockId]()
        self.dropped = dict[BlockId, int]()
        # Of each source, the last windows that were opened, and how many documents they have.
        self._documents = {corpus.name: deque[tuple[tuple[int, int], int]](maxlen=_COUNTED) for corpus in corpora}
        self._window = lru_cache(_WINDOWS * len(corpora))(self._load)

    def next(self, cursor: Cursor) -> tuple[SequenceTable, Cursor] | None:
        """Return the sequences of the step at a cursor, and the cursor of the next step.

        A step takes documents until the next one would exceed `batch_tokens` inputs; it may continue with documents of
        the next epoch. A longer document forms a step alone, or, with `data.long=split`, its pieces of at most
        `context` inputs are distributed over steps. Returns None if the run ends there, see `ended`. Raises DataError
        if a source has no document to train on.
        """
        drawn = self._draw(cursor)
        parts, mixer = drawn.draws.parts, drawn.draws.mixer
        if not len(parts.length):
            return None
        given = [drawn.given.get(name, []) for name in mixer.names]
        sizes = np.array([sum(len(some.inputs) for some in of_source) for of_source in given])
        first = np.cumsum(sizes) - sizes  # document of each source among all that were given
        documents = Documents.joined([*chain(*given)]).chosen(first[parts.source] + parts.document)
        numbers = np.array([self._number[name] for name in mixer.names])
        table = sequences_of(
            self.corpora, numbers[parts.source], documents, parts.start, parts.length, self._config.context
        )
        tokens = cursor.tokens + drawn.draws.tokens
        return table, Cursor(
            cursor.step + 1, tokens, drawn.places, mixer.state, self._order_of(cursor.order), drawn.waiting
        )

    def ended(self, cursor: Cursor) -> str | None:
        """Return why there is no step at a cursor and how to continue; None if there is one.

        A run ends when a source has been used up and `data.exhausted` is `stop`, or when all sources that have a weight
        at the step have been dropped, whatever later segments of `data.mix` have.
        """
        if all(policy == "repeat" for policy in self._exhausted.values()):
            return None
        drawn = self._draw(cursor, most=1)
        if drawn.draws.count:
            return None
        stops, dropped = drawn.stops, drawn.draws.mixer.dropped
        weights = weights_at(self._segments, cursor.step, cursor.tokens)
        used = [name for name, weight in weights.items() if weight] if stops is None else [stops]
        what = (
            f"all documents of {', '.join(used)} were used" if self._config.data.sources else "all documents were used"
        )
        again = " ".join(f"{key}=repeat" for key in dict.fromkeys(map(self._policy_key, used)))
        present = segment_at(self._segments, cursor.step, cursor.tokens)
        later = [*chain(*(segment.weights.items() for segment in self._segments[present + 1 :]))]
        others = [name for name, weight in later if weight and name not in dropped]
        if stops is not None or not others:
            return f"{what}; set {again} to use them again"
        start = f"{self._segments[present].unit.removesuffix('s')} {self._segments[present].start}"
        return (
            f"{what}, and the segment of data.mix from {start} on has no other source; "
            f"give {', '.join(dict.fromkeys(others))} a weight there to continue, or set {again}"
        )

    def validation(self, order: int) -> dict[str, SequenceTable]:
        """Return the validation set of each source: pieces of documents, until the next would exceed its inputs.

        The sources divide `data.validation_tokens` equally; the set of a source without a weight consists of any of its
        documents. The pieces are shuffled, so that a small set covers many documents: they are from the first windows
        of a random order that have together four times as many inputs, or from the first 16 windows. The set depends on
        the number of the run's order (`Cursor.order`), but not on its seed. It has at least one piece; sources without
        validation documents have none.
        """
        corpora = self._validated()
        tokens = self._config.data.validation_tokens // max(1, len(corpora))
        tables = {corpus.name: self._pieces(corpus, order, tokens) for corpus in corpora if tokens}
        return {name: table for name, table in tables.items() if len(table)}

    def upcoming(self, cursor: Cursor, tokens: int) -> Iterator[BlockId]:
        """Yield the blocks of texts that the next `tokens` inputs open, about. Opens nothing.

        Of each source, they are those of its window at `cursor`, and of the next ones until these have its part of the
        `tokens`, or are as many as the source has. They are in the order in which they are needed if sources are used
        equally fast.
        """
        weights = self._mixer(cursor).weights
        for found in self._ahead(cursor, {name: tokens * weight for name, weight in weights.items()}):
            yield from found.blocks

    def windows_ahead(self, cursor: Cursor) -> Iterator[WindowAhead]:
        """Yield the windows that loaders pack ahead of a cursor, in the order of `upcoming`.

        They are those of AHEAD_STEPS steps, and, of a source whose weight will rise within RISE_STEPS, those that it is
        needed for until then beyond its present weight.
        """
        later, parts = self.weights_ahead(cursor), dict[str, int]()
        for name, weight in self._mixer(cursor).weights.items():
            rise = sum(max(0, one.get(name, 0) - weight) for one in later)
            parts[name] = self.batch_tokens * (AHEAD_STEPS * weight + rise)
        return self._ahead(cursor, parts)

    def weights_ahead(self, cursor: Cursor) -> list[dict[str, int]]:
        """Return the weights of the step at a cursor and of the next ones, RISE_STEPS in all, as they are announced."""
        batch, steps = self.batch_tokens, range(RISE_STEPS)
        return [weights_at(self._segments, cursor.step + one, cursor.tokens + one * batch) for one in steps]

    def _ahead(self, cursor: Cursor, parts: Mapping[str, int]) -> Iterator[WindowAhead]:
        """Yield windows of each source until they have its part, in inputs / SCALE; see `upcoming`."""
        waiting = deque[tuple[Corpus, Iterator[list[int]], float, int, int]]()
        for name, part in parts.items():
            corpus, place = self.corpora[self._number[name]], self._walk(name, cursor).position
            if corpus.share == 1 or isinstance(corpus, TokenCorpus):
                continue
            left, used = -(-self._text_bytes(part) // SCALE), 0.0
            if place.document + place.start > 0:
                taken = max(place.document, 1)
                used = taken / dict(self._documents[name]).get((place.epoch, place.window), taken)
            waiting.append((corpus, self._windows(corpus, cursor.order, place), used, left, 0))
        # One window of each source in turn, until its part is reached.
        while waiting:
            corpus, windows, used, left, count = waiting.popleft()
            if (blocks := next(windows, None)) is None:
                continue
            size = sum(map(corpus.size, blocks))
            yield WindowAhead([BlockId(corpus.name, block) for block in blocks], size / self._text_bytes(1), used)
            # How much of a window has been taken is known only in documents, so it counts as used up.
            left, count = left - (0 if used else size), count + len(blocks)
            if left > 0 and count < corpus.blocks:  # a small source would have thousands of epochs
                waiting.append((corpus, windows, 0.0, left, count))

    def _order_of(self, order: int) -> int:
        """Return the number of the order of a cursor: that of a new run depends on how many documents there are."""
        return self._order_of_new if order == OF_NEW_RUN else order

    @cached_property
    def _order_of_new(self) -> int:
        return order_of_new(self.corpora)

    def _windows(self, corpus: Corpus, order: int, place: Place) -> Iterator[list[int]]:
        """Yield the blocks of the window at a place, and of each later one until the source has been used up."""
        epoch, window = place.epoch, place.window
        while corpus.blocks and (epoch == 0 or self._exhausted[corpus.name] == "repeat"):
            yield from window_blocks(corpus, self._key(corpus.name, epoch), self._order_of(order), window)
            epoch, window = epoch + 1, 0

    def validating(self, order: int) -> Iterator[BlockId]:
        """Yield the blocks of texts from which the validation documents are chosen, about; opens nothing."""
        corpora = self._validated()
        tokens = self._config.data.validation_tokens // max(1, len(corpora))
        for corpus in corpora:
            if isinstance(corpus, TokenCorpus):
                continue
            left = self._text_bytes(_POOL * tokens) / corpus.share
            for blocks in islice(
                window_blocks(corpus, f"validation, {corpus.name}", self._order_of(order), 0), _SEARCHED
            ):
                yield from (BlockId(corpus.name, block) for block in blocks)
                left -= sum(map(corpus.size, blocks))
                if left <= 0:
                    break

    def _text_bytes(self, tokens: int) -> int:
        """Return about how many bytes of text have so many tokens."""
        return tokens if self._config.data.tokenizer == BYTES else _TOKEN_BYTES * tokens

    def _validated(self) -> list[Corpus]:
        return [corpus for corpus in self.corpora if corpus.share and self._config.data.validation_tokens]

    def _pieces(self, corpus: Corpus, order: int, tokens: int) -> SequenceTable:
        """Return a validation set of about `tokens` inputs."""
        key, place, documents, found = f"validation, {corpus.name}", 0, list[Documents](), 0
        for _ in range(_SEARCHED):
            here = window(corpus, key, self._order_of(order), place)
            self._note(here)
            documents.append(here.validated)
            place, found = place + here.blocks, found + int(here.validated.inputs.sum())
            if found >= _POOL * tokens or place == corpus.blocks:
                break
        pool = Documents.joined(documents)
        start = np.zeros_like(pool.inputs)
        table = sequences_of(
            self.corpora, start + self._number[corpus.name], pool, start, pool.inputs, self._config.context
        )
        shuffled = Permutation(len(table), key)(np.arange(len(table)))
        return table.chosen(shuffled[: fitting(table.length[shuffled], tokens) if len(shuffled) else 0])

    def _policy_key(self, name: str) -> str:
        """Return the key that decides what happens when a source has been used up."""
        source = self._config.data.sources.get(name)
        return f"data.sources.{name}.exhausted" if source and source.exhausted else "data.exhausted"

    def _draw(self, cursor: Cursor, most: int | None = None) -> _Drawn:
        """Draw the documents of the step at a cursor, at most `most` parts.

        Sources that have been used up are dropped from the mixer if `data.exhausted` is `drop`.
        """
        from engine.data.draws import QUEUED, Draws  # loads numba, which few processes need

        config, places = self._config, dict(cursor.places)
        piece = config.context if config.data.long == "split" else None
        draws = Draws(self._mixer(cursor), config.batch_tokens, piece, most)
        given, walks, stops = dict[str, list[Documents]](), dict[str, Walk](), None
        while (name := draws.run()) is not None:
            if name in walks:
                walks[name].settle(*draws.used(name))
            else:
                walks[name] = self._walk(name, cursor)
            if (found := self._give(name, walks[name], QUEUED)) is not None:
                documents, start = found
                if piece is None:
                    check_longest(self.corpora[self._number[name]], documents, len(draws.mixer.names))
                given.setdefault(name, []).append(documents)
                draws.give(name, documents.inputs, start)
            elif self._exhausted[name] == "stop":
                stops = name
                break
            else:
                draws.mixer.drop(name)
        # What was given and not taken stays for the next step.
        waiting = dict(cursor.waiting)
        for name, walk in walks.items():
            walk.settle(*draws.used(name))
            if walk.place != Place():
                places[name] = walk.place
            waiting[name] = tuple(walk.waiting)
        return _Drawn(draws, given, places, stops, {name: some for name, some in waiting.items() if some})

    def _mixer(self, cursor: Cursor) -> Mixer:
        """Return what chooses the sources of the step at a cursor. Only sources of the present config remain."""
        weights = weights_at(self._segments, cursor.step, cursor.tokens)
        gone = sorted({*cursor.mixer["sources"]} - {*weights}) if cursor.mixer else []
        mixer = Mixer([*weights, *gone], cursor.mixer)
        # A resumed run may set a source that was dropped to repeat its documents.
        mixer.dropped -= {name for name in mixer.dropped if self._exhausted.get(name) == "repeat"}
        # One that was dropped may have documents that have waited for this segment.
        least, most = self._lengths_at(cursor)
        for name, some in cursor.waiting.items():
            if any(one.least <= most and one.most >= least for one in some):
                mixer.dropped.discard(name)
        mixer.weights = {**dict.fromkeys(gone, 0), **weights}
        for name in gone:
            mixer.forget(name)
        return mixer

    def _key(self, name: str, epoch: int) -> str:
        return f"seed {self._config.run.seed}, source {name}, epoch {epoch}"

    def _load(self, name: str, order: int, epoch: int, place: int) -> tuple[Documents, int]:
        """Return the documents to train on of a window, and its number of blocks."""
        corpus = self.corpora[self._number[name]]
        found = window(corpus, self._key(name, epoch), order, place)
        self._note(found)
        self._documents[name].append(((epoch, place), len(found.trained.inputs)))
        inputs = found.trained.inputs
        taken = np.zeros(len(inputs), dtype=np.bool_)
        for least, most in {*self._lengths}:
            taken |= (inputs >= least) & (inputs <= most)
        if not taken.all():
            raise never_taken(name, int(inputs[~taken][0]), corpus.place, self._lengths)
        return found.trained, found.blocks

    def _note(self, window: Window) -> None:
        """Record the documents that were left out of the blocks of a window. Most blocks occur again in each epoch."""
        new = [one for one in window.unusable if (one.source, one.block) not in self._noted]
        self._noted |= {BlockId(one.source, one.block) for one in new}
        self.unusable += new
        self.dropped |= window.dropped

    def _lengths_at(self, cursor: Cursor) -> LengthRange:
        """Return the lengths of the documents of the step at a cursor."""
        return self._lengths[segment_at(self._segments, cursor.step, cursor.tokens)]

    def _walk(self, name: str, cursor: Cursor) -> Walk:
        """Return what gives the documents of a source for the step at a cursor."""
        place, waiting = cursor.places.get(name, Place()), cursor.waiting.get(name, ())
        bounds = {edge for least, most in self._lengths for edge in (least, most + 1)}
        blocks = self.corpora[self._number[name]].blocks

        def load(place: Place) -> tuple[Documents, int]:
            return self._window(name, self._order_of(cursor.order), place.epoch, place.window)

        return Walk(place, waiting, self._lengths_at(cursor), sorted(bounds), load, blocks)

    def _give(self, name: str, walk: Walk, most: int) -> tuple[Documents, int] | None:
        """Return the next documents of a source; see `Walk.give`. Raises DataError if a whole epoch has none."""
        try:
            return walk.give(most, self._exhausted[name] == "repeat")
        except LookupError:
            corpus = self.corpora[self._number[name]]
            if walk.lengths == ANY:
                with of_source(self._config.data, name):
                    raise no_documents(corpus) from None
            raise none_of_lengths(name, corpus.place, walk.lengths) from None


class _Drawn(NamedTuple):
    """The documents of a step."""

    draws: Draws
    given: Mapping[str, Sequence[Documents]]  # by source, those that were drawn and more
    places: Mapping[str, Place]  # behind those that were drawn
    stops: str | None  # the source that has been used up and ends the run
    waiting: Mapping[str, Sequence[Waiting]]  # those that were passed over


def check_longest(corpus: Corpus, documents: Documents, sources: int) -> None:
    """Raise DataError if a document is too long for the integers of the mixture of `sources` sources."""
    longest, most = int(documents.inputs.max()), longest_document(sources)
    if longest > most:
        message = f"has a document of {longest:,} tokens; with {sources} sources it may have at most {most:,}"
        raise DataError(message, key=corpus.place, hint="set data.long=split, or use fewer sources")


def waiting_at(cursor: Cursor, segments: Sequence[Segment]) -> dict[str, tuple[int, int]]:
    """Return how many documents of each source were passed over because of their lengths, before a cursor.

    They are those that a segment from that of the cursor on takes, and those that none does, which are left out.
    Sources without such documents are not named.
    """
    lengths, found = [one.lengths for one in segments[segment_at(segments, cursor.step, cursor.tokens) :]], {}
    for name, some in cursor.waiting.items():
        waits = [
            one.documents for one in some if any(least <= one.least and one.most <= most for least, most in lengths)
        ]
        found[name] = sum(waits), sum(one.documents for one in some) - sum(waits)
    return found


def no_documents(corpus: Corpus) -> DataError:
    """Create the DataError for a source without any document to train on. Looks for the first that is not empty."""
    documents = empty = broken = dropped = 0
    for block in range(corpus.blocks):
        lengths = corpus.lengths(block)
        inputs, left_out = lengths.inputs(), lengths.left_out
        documents += len(inputs)
        if left_out is not None:
            empty, broken = empty + len(left_out.empty), broken + len(left_out.broken)
            dropped += left_out.dropped
        if corpus.share and (inputs > 0).any():
            message = f"every document of {corpus.place} is used for validation, none for training"
            return DataError(message, key="data.validation_share", hint="lower it; 0 trains on every document")
    blocks = corpus.texts.blocks if isinstance(corpus, TextCorpus) else ()
    return nothing_to_train(corpus.place, blocks, empty + documents, broken, dropped)
