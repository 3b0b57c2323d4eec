"""Draws the documents of a step: the mixture chooses a source, which gives its next document, until the step is full.

Steps have 100,000 documents and more on large clusters, and every choice depends on the one before. So the loop over
documents is compiled, and works on queues: the lengths of the next documents of each source.

Letters: N sources, Q documents of a queue, K parts of documents.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import njit_in_place
from engine.data.mixture import SCALE, Mixer
from engine.units import Ints

QUEUED = 1024  # most documents of a queue
_PARTS = 1 << 12  # for which there is memory at first
_FULL, _NONE, _MORE = -1, -2, -3  # why `_take` has stopped: the step is full, no source can be chosen, more memory


class Parts(NamedTuple):
    """Parts of documents, in the order in which they were drawn."""

    source: Ints  # [K] number of the source among the names of the mixer
    document: Ints  # [K] number of the document among those that the source was given
    start: Ints  # [K] first input
    length: Ints  # [K] number of inputs


class Queues(NamedTuple):
    """The documents that each source gives next."""

    inputs: Ints  # [N, Q]
    size: Ints  # [N] documents of the queue
    taken: Ints  # [N] documents of them that have been taken
    start: Ints  # [N] inputs of the next document that have been taken
    before: Ints  # [N] documents of earlier queues


class Draws:
    """The documents of one step. It changes the mixer, which must have its weights.

    Call `run`, and `give` the source that it returns its next documents, until it returns None.
    """

    def __init__(self, mixer: Mixer, batch_tokens: int, piece: int | None = None, most: int | None = None) -> None:
        """Begin a step without documents. It ends before the document with which it would exceed `batch_tokens`.

        A longer document is a step alone, or, with `piece`, is given in pieces of at most so many inputs. With `most`
        the step has at most so many parts.
        """
        self.mixer, self.tokens, self.count = mixer, 0, 0
        self._batch_tokens, self._piece, self._most = batch_tokens, piece, most
        self._number = {name: number for number, name in enumerate(mixer.names)}
        n = len(mixer.names)
        self._queues = Queues(np.empty((n, QUEUED), dtype=np.int64), *np.zeros((4, n), dtype=np.int64))
        self._parts = Parts(*np.empty((4, min(_PARTS, most or _PARTS)), dtype=np.int64))

    def run(self) -> str | None:
        """Draw documents. Returns the name of the source that must give the next one; None if the step is complete."""
        mixer = self.mixer
        counters = np.array([mixer.longest, self.tokens, self.count], dtype=np.int64)
        limits = np.array([SCALE, self._batch_tokens, self._piece or 0], dtype=np.int64)
        while True:
            why = _take(mixer.shares, mixer.debts, mixer.taken, self._queues, self._parts, counters, limits)
            mixer.longest, self.tokens, self.count = counters.tolist()
            if why != _MORE or self.count == self._most:
                return mixer.names[why] if why >= 0 else None
            size = min(2 * self.count, self._most or 2 * self.count)
            self._parts = Parts(*(np.resize(column, size) for column in self._parts))

    def give(self, name: str, inputs: Ints, start: int = 0) -> None:
        """Give a source its next documents, of `inputs` [D] inputs each, D <= QUEUED, after all before were taken.

        `start` inputs of the first one were taken by an earlier step.
        """
        number, queues = self._number[name], self._queues
        assert queues.taken[number] == queues.size[number]
        queues.inputs[number, : len(inputs)] = inputs
        queues.before[number] += queues.size[number]
        queues.size[number], queues.taken[number], queues.start[number] = len(inputs), 0, start

    def used(self, name: str) -> tuple[int, int]:
        """Return how many of the documents that a source was given last have been taken, and inputs of the next."""
        number, queues = self._number[name], self._queues
        return int(queues.taken[number]), int(queues.start[number])

    @property
    def parts(self) -> Parts:
        """All parts of documents."""
        return Parts(*(column[: self.count] for column in self._parts))


@njit_in_place
def _take(shares: Ints, debts: Ints, had: Ints, queues: Queues, taken: Parts, counters: Ints, limits: Ints) -> int:
    """Draw documents until a queue is empty; returns the number of its source, or _FULL, _NONE or _MORE.

    Changes `debts` and `had` [N] of the Mixer, the queues, and `counters`: the longest part of the run so far, and the
    tokens and parts of the step. `limits` are SCALE, `batch_tokens`, and the longest piece of a document that is longer
    than the batch, 0 if it is not split. Sources with a share of -1 are left out.
    """
    longest, tokens, parts = counters[0], counters[1], counters[2]
    scale, batch, piece = limits[0], limits[1], limits[2]
    why = _MORE
    while parts < len(taken.source):
        # The source that is due first, of those that are not ahead. Ties: the larger weight, then the first name.
        limit, source, first = longest * scale, -1, longest
        for other in range(len(shares)):
            if shares[other] < 0 or debts[other] < 0:
                continue
            # Tokens until the debt is `limit`. Rounding down is exact, because documents end at whole tokens. A weight
            # of 0 counts as the smallest: the debt is paid when the others are ahead, and debts do not add up over
            # segments.
            due = (limit - debts[other]) // max(shares[other], 1)
            if source < 0 or due < first or (due == first and shares[other] > shares[source]):
                source, first = other, due
        if source < 0 or queues.taken[source] == queues.size[source]:
            why = source if source >= 0 else _NONE
            break
        # A document is taken only if it fits, so the next step draws the same one again.
        document, start = queues.taken[source], queues.start[source]
        length = queues.inputs[source, document] - start
        if piece > 0 and length > batch:
            length = min(length, piece)
        if parts > 0 and tokens + length > batch:
            why = _FULL
            break
        taken.source[parts], taken.document[parts] = source, queues.before[source] + document
        taken.start[parts], taken.length[parts] = start, length
        parts += 1
        tokens += length
        queues.start[source] = start + length
        if start + length >= queues.inputs[source, document]:
            queues.taken[source], queues.start[source] = document + 1, 0
        for other in range(len(shares)):
            debts[other] += max(shares[other], 0) * length
        debts[source] -= scale * length
        had[source] += length
        longest = max(longest, length)
    counters[0], counters[1], counters[2] = longest, tokens, parts
    return why
