"""The reference of draws: a loop over documents, in Python's integers of any size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.data.mixture import SCALE, scaled, split, weights_at
from engine.data.sequences import SequenceTable
from engine.data.steps import Cursor, Steps, no_documents
from engine.data.walk import Place
from engine.units import Ints


class SlowMixer:
    """Chooses the source of each document. Its state is that of Mixer."""

    def __init__(self, names: Iterable[str], state: Mapping[str, Any] | None = None) -> None:
        state = state or {"sources": {}, "dropped": [], "longest": 0}
        saved = {name: state["sources"].get(name, (0, 0)) for name in sorted(names)}
        self.taken = {name: int(taken) for name, (taken, _) in saved.items()}
        self.debts = {name: int(debt) for name, (_, debt) in saved.items()}
        self.longest = int(state["longest"])
        self.dropped = set(state["dropped"])
        self.given: Mapping[str, int] = dict.fromkeys(saved, 0)
        self.weights: dict[str, int] = {}

    @property
    def state(self) -> dict[str, Any]:
        sources = {name: [self.taken[name], self.debts[name]] for name in self.taken}
        return {"sources": sources, "dropped": sorted(self.dropped), "longest": self.longest}

    def set(self, weights: Mapping[str, int]) -> None:
        self.given = weights
        left = {name: weights[name] for name in self.debts if name not in self.dropped}
        self.weights = scaled(left) if any(left.values()) else {}

    def choose(self) -> str | None:
        limit, best, best_key = self.longest * SCALE, None, (0, 0)
        for name, weight in self.weights.items():
            if self.debts[name] >= 0:
                key = ((limit - self.debts[name]) // (weight or 1), -weight)
                if best is None or key < best_key:
                    best, best_key = name, key
        return best

    def took(self, name: str, tokens: int) -> None:
        for other, weight in self.weights.items():
            self.debts[other] += weight * tokens
        self.debts[name] -= SCALE * tokens
        self.taken[name] += tokens
        self.longest = max(self.longest, tokens)

    def forget(self, name: str) -> None:
        self.drop(name)
        self.dropped.remove(name)
        del self.taken[name], self.debts[name]

    def drop(self, name: str) -> None:
        self.dropped.add(name)
        self.set(self.given)
        debt, self.debts[name] = self.debts[name], 0
        left = {other: self.given[other] for other in self.debts if other not in self.dropped}
        if not any(left.values()):
            left = dict.fromkeys(left, 1)
        for other, part in (split(debt, left) if left else {}).items():
            self.debts[other] += part


class Part(NamedTuple):
    """Inputs start .. start + length - 1 of a document, which belong to one step."""

    source: int
    block: int
    document: int
    start: int
    length: int
    hash: int


class OneByOne(Steps):
    """Steps that draw one document after the other, and look at the mask of each sequence."""

    def next(self, cursor: Cursor) -> tuple[SequenceTable, Cursor] | None:
        batch, parts, tokens = self._config.batch_tokens, list[Part](), 0
        places, mixer = dict(cursor.places), self._slow_mixer(cursor)
        while (drawn := self._draw_one(mixer, places, cursor.order)) is not None:
            name, part, after = drawn
            if parts and tokens + part.length > batch:
                break
            parts.append(part)
            tokens += part.length
            places[name] = after
            mixer.took(name, part.length)
        if not parts:
            return None
        after = Cursor(cursor.step + 1, cursor.tokens + tokens, places, mixer.state, cursor.order)
        return self._table(parts), after

    def has_ended(self, cursor: Cursor) -> bool:
        """Whether there is no step at a cursor."""
        return self._draw_one(self._slow_mixer(cursor), cursor.places, cursor.order) is None

    def _slow_mixer(self, cursor: Cursor) -> SlowMixer:
        weights = weights_at(self._segments, cursor.step, cursor.tokens)
        gone = sorted({*cursor.mixer["sources"]} - {*weights}) if cursor.mixer else []
        mixer = SlowMixer([*weights, *gone], cursor.mixer)
        mixer.dropped -= {name for name in mixer.dropped if self._exhausted.get(name) == "repeat"}
        mixer.set({**dict.fromkeys(gone, 0), **weights})
        for name in gone:
            mixer.forget(name)
        return mixer

    def _draw_one(self, mixer: SlowMixer, places: Mapping[str, Place], order: int) -> tuple[str, Part, Place] | None:
        while (name := mixer.choose()) is not None:
            if (found := self._part_at(name, places.get(name, Place()), order)) is not None:
                return name, *found
            if self._exhausted[name] == "stop":
                return None
            mixer.drop(name)
        return None

    def _part_at(self, name: str, place: Place, order: int) -> tuple[Part, Place] | None:
        corpus, begin = self.corpora[self._number[name]], place
        while place.epoch == 0 or self._exhausted[name] == "repeat":
            documents, blocks = self._window(name, order, place.epoch, place.window)
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
                if place.epoch > begin.epoch or begin == Place():
                    raise no_documents(corpus)
                place = Place(place.epoch + 1)
        return None

    def _table(self, parts: Sequence[Part]) -> SequenceTable:
        rows, hashes, context = list[tuple[int, ...]](), list[int](), self._config.context
        blocks = {(part.source, part.block) for part in parts}
        runs_of = {(source, block): self.corpora[source].lengths(block).runs().tolist() for source, block in blocks}
        for source, block, document, begin, inputs, content in parts:
            runs = [run for run in runs_of[source, block] if run[0] == document]
            for start in range(begin, begin + inputs, context):
                length = min(context, begin + inputs - start)
                labels = range(start + 1, start + length + 1)
                uncounted = sum(first <= label < last for _, first, last in runs for label in labels)
                rows.append((source, block, document, start, length, length - uncounted))
                hashes.append(content)
        columns: Sequence[Ints] = np.array(rows, dtype=np.int64).T
        return SequenceTable(*columns, np.array(hashes, dtype=np.uint64))
