"""Walks the documents of a source in its order, and remembers those that wait for another segment of the mixture.

```
 order              a 3   b 90  c 5   d 40  e 7 | f 80  g 2         with the number of inputs
 lengths: [1, 9]    take        take        take|                   b and d were passed over, so they wait
 lengths: [1, 99]         take        take      | take  take        those that wait come first, in the same order
```
There is no table of documents: lengths are divided into classes, such that a segment takes all documents of a class or
none, and for each class the place is kept from which its documents wait. A document that was taken is before the place
of its class, so each document of an epoch is taken once, or counted as one that waits.

Letters: N documents of a window, C classes of lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from engine.data.mixture import ANY, LengthRange
from engine.data.order import Documents
from engine.errors import DataError
from engine.units import Ints


class Place(NamedTuple):
    """How far a source has been used: the place of its next document in its order."""

    epoch: int = 0
    window: int = 0  # blocks of the epoch before the present window
    document: int = 0  # documents of the window that have been taken
    start: int = 0  # inputs of the next document that have been taken, if it is split between steps


class Waiting(NamedTuple):
    """Documents with `least` to `most` inputs that were passed over, from `place` to the place of their source."""

    least: int
    most: int
    place: Place
    documents: int

    @classmethod
    def of_json(cls, found: Sequence[int | Sequence[int]]) -> Waiting:
        """Return what JSON made a list."""
        least, most, place, documents = found
        return cls(least, most, Place(*place), documents)  # type: ignore[arg-type, misc]


class _Given(NamedTuple):
    window: Place  # of its first document
    documents: Documents
    chosen: Ints  # numbers of those that were given
    start: int  # inputs of the first one that have been taken


Load = Callable[[Place], tuple[Documents, int]]  # the documents of a window and its number of blocks


class Walk:
    """The next documents of a source that have some lengths. Call `give`, then `settle` when some have been taken."""

    def __init__(
        self,
        place: Place,
        waiting: Sequence[Waiting],
        lengths: LengthRange,
        bounds: Sequence[int],
        load: Load,
        blocks: int,
    ) -> None:
        """Begin at the state after an earlier step. `bounds` are lengths at which classes begin, besides `lengths`.

        The epoch has `blocks` blocks.
        """
        self.place, self.lengths, self._load, self._blocks = place, lengths, load, blocks
        intervals = [lengths, *((one.least, one.most) for one in waiting)]
        others = (edge for least, most in intervals for edge in (least, most + 1))
        edges = sorted({1, *bounds, *others} - {ANY[1] + 1})
        self._least = np.array(edges, dtype=np.int64)  # [C]
        self._takes = (self._least >= lengths[0]) & (self._least <= lengths[1])  # [C]
        # The place from which documents of a class wait, and how many; None if no one waits.
        self._behind: list[Place | None] = [None] * len(edges)
        self._waits = np.zeros(len(edges), dtype=np.int64)
        for one in waiting:
            inside = np.flatnonzero((self._least >= one.least) & (self._least <= one.most)).tolist()
            counts = [one.documents] if len(inside) == 1 else self._counted(one.place)[inside].tolist()
            for number, count in zip(inside, counts, strict=True):
                if count:
                    self._behind[number], self._waits[number] = one.place, count
        self._given: _Given | None = None
        self._forget_passed()

    @property
    def waiting(self) -> list[Waiting]:
        """The documents that wait."""
        ends = [*(self._least[1:] - 1).tolist(), ANY[1]]
        return [
            Waiting(int(least), end, place, int(count))
            for least, end, place, count in zip(self._least, ends, self._behind, self._waits, strict=True)
            if place is not None
        ]

    @property
    def position(self) -> Place:
        """The place before which all documents of its lengths have been taken."""
        takes = zip(self._behind, self._takes.tolist(), strict=True)
        return min((one for one, taken in takes if taken and one is not None), default=self.place)

    def give(self, most: int, repeat: bool) -> tuple[Documents, int] | None:
        """Return the next documents, at most `most` and of one window, and how many inputs of the first were taken.

        Returns None if the source has been used up, which happens only without `repeat`. Raises LookupError if there
        is none in a whole epoch.
        """
        begin = place = self.position
        self._forget_passed()
        while place.epoch == 0 or repeat:
            documents, blocks = self._load(place)
            chosen = self._untaken(place, documents, most)
            if len(chosen):
                at = (
                    [self._start(place, documents, number) for number in chosen.tolist()]
                    if len(self._least) > 1
                    else []
                )
                # Only the first one may have been begun.
                cut = next((number for number, start in enumerate(at) if start and number), len(chosen))
                start = at[0] if at else place.start
                self._given = _Given(place._replace(document=0, start=0), documents, chosen[:cut], start)
                return documents.chosen(chosen[:cut]), start
            self._pass(place, documents, len(documents.inputs))
            place = Place(place.epoch, place.window + blocks)
            if place.window == self._blocks:
                if place.epoch > begin.epoch or begin == Place():
                    raise LookupError
                place = Place(place.epoch + 1)
        # What was passed over until the end waits, if others than these lengths exist.
        if len(self._least) > 1 and place > self.place:
            self._move(place)
        return None

    def settle(self, used: int, start: int) -> None:
        """Move behind the documents that were taken: `used` of those given, and `start` inputs of the next."""
        given, self._given = self._given, None
        if given is None or (used, start) == (0, given.start):
            return
        document = int(given.chosen[used]) if start else int(given.chosen[used - 1]) + 1
        after = given.window._replace(document=document, start=start)
        if after[:3] > self.place[:3] or (after[:3] == self.place[:3] and start):
            self._pass(given.window, given.documents, document)
            self._move(after)
            return
        # They are of those that waited.
        taken = given.documents.inputs[given.chosen[:used]]
        self._waits -= np.bincount(self._classes(taken), minlength=len(self._least))
        begun = int(self._classes(given.documents.inputs[[document]])[0]) if start else -1
        for number, behind in enumerate(self._behind):
            if behind is not None and self._takes[number] and (behind < after or number == begun):
                self._behind[number] = after._replace(start=start if number == begun else 0)
            if not self._waits[number]:
                self._behind[number] = None

    def _classes(self, inputs: Ints) -> Ints:
        """Return the class of each of some lengths [N]."""
        return np.searchsorted(self._least, inputs, side="right") - 1

    def _untaken(self, window: Place, documents: Documents, most: int) -> Ints:
        """Return the numbers of the first documents of a window, at most `most`, that can be taken."""
        begins = [self._begin(window, place or self.place) for place in self._behind]
        if len(begins) == 1:
            return np.arange(begins[0], min(begins[0] + most, len(documents.inputs)))
        first = min(begins)
        classes = self._classes(documents.inputs[first:])
        free = self._takes[classes] & (np.arange(first, len(documents.inputs)) >= np.array(begins)[classes])
        return np.flatnonzero(free)[:most] + first

    def _begin(self, window: Place, place: Place) -> int:
        """Return the number of documents of a window that are before a place."""
        here = window[:2]
        return 0 if place[:2] < here else place.document if place[:2] == here else 1 << 62

    def _start(self, window: Place, documents: Documents, number: int) -> int:
        """Return how many inputs of a document of a window were taken."""
        behind = self._behind[int(self._classes(documents.inputs[[number]])[0])] or self.place
        return behind.start if behind[:3] == (*window[:2], number) else 0

    def _pass(self, window: Place, documents: Documents, stop: int) -> None:
        """Count the documents of a window up to number `stop` that are passed over, from the place of the source on."""
        first = self._begin(window, self.place)
        if first >= stop or len(self._least) == 1:
            return
        classes = self._classes(documents.inputs[first:stop])
        self._passed += np.bincount(classes, minlength=len(self._least))
        for number in np.unique(classes).tolist():
            if self._first[number] is None:
                at = first + int(np.flatnonzero(classes == number)[0])
                begun = self.place.start if (*window[:2], at) == self.place[:3] else 0
                self._first[number] = Place(*window[:2], at, begun)

    def _move(self, place: Place) -> None:
        """Move the place of the source. Those that were passed over wait, if they do not have the lengths."""
        for number, takes in enumerate(self._takes.tolist()):
            if takes:
                self._behind[number], self._waits[number] = None, 0
            elif self._passed[number]:
                self._behind[number] = self._behind[number] or self._first[number]
                self._waits[number] += self._passed[number]
        self.place = place
        self._forget_passed()

    def _forget_passed(self) -> None:
        self._passed = np.zeros(len(self._least), dtype=np.int64)
        self._first: list[Place | None] = [None] * len(self._least)

    def _counted(self, place: Place) -> Ints:
        """Count the documents of each class from a place to that of the source: int64 [C]. They are looked up again."""
        found, first = np.zeros(len(self._least), dtype=np.int64), place.document
        while place[:2] < self.place[:2] or (place[:2] == self.place[:2] and self.place.document):
            documents, blocks = self._load(place)
            stop = self.place.document if place[:2] == self.place[:2] else len(documents.inputs)
            found += np.bincount(self._classes(documents.inputs[first:stop]), minlength=len(self._least))
            place, first = Place(place.epoch, place.window + blocks), 0
            if place.window == self._blocks:
                place = Place(place.epoch + 1)
        return found


def never_taken(name: str, inputs: int, place: str, lengths: Sequence[LengthRange]) -> DataError:
    """Create the DataError for a document whose length no segment of `data.mix` has: it would wait forever."""
    above = min((least for least, _ in lengths if least > inputs), default=None)  # the nearest lengths that are taken
    below = max((most for _, most in lengths if most < inputs), default=None)
    missing = f"{(below or 0) + 1:,} to {above - 1:,}" if above else f"more than {below:,}"
    message = f"{name} has a document of {inputs:,} tokens, and no segment of data.mix takes {missing} tokens"
    hint = "widen `lengths` of a segment"
    if below is None or above is None:  # `drop` cannot leave out lengths between others
        drop = f"shorter: {above}" if below is None else f"longer: {below}"
        hint += f", or leave such documents out: data.sources.{name}.transform=[{{drop: {{{drop}}}}}]"
    return DataError(message, key=place, hint=hint)


def none_of_lengths(name: str, place: str, lengths: LengthRange) -> DataError:
    """Create the DataError for a source without any document for a segment."""
    message = f"{name} has no document of {lengths[0]:,} to {lengths[1]:,} tokens, the lengths of a segment of data.mix"
    hint = f"widen `lengths` of the segment, or set the weight of {name} to 0 there"
    return DataError(message, key=place, hint=hint)
