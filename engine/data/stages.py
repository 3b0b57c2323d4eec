"""The stages of a mixture, compiled before a run: what each source gives in each segment, and when one is used up.

Everything follows from document lengths that are known, without any order of documents: in a stage, a source gives
tokens in proportion to its weight, and documents of its mean length. So numbers of steps, documents and tokens of a
stage are estimates. In a run, a source is at most one document ahead of its share (mixture.py).

Letters: N documents of a source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.config import schema
from engine.config.schema import Config
from engine.config.sources import source_configs
from engine.data.mixture import ANY, LengthRange, segments_of, weights_at
from engine.data.opening import validation_shares
from engine.data.scan import Documents
from engine.data.walk import never_taken, none_of_lengths
from engine.units import Floats, Ints

_ROUNDING = 1e-9  # of sums of floats
_PARTS = 64  # of a segment in which weights move; they are constant in each


@dataclass(frozen=True)
class Given:
    """What a source gives in a stage."""

    source: str
    share: float  # of the tokens of the stage
    tokens: float
    documents: float
    longest: int  # inputs of its longest document


@dataclass(frozen=True)
class Stage:
    """The steps of one segment of `data.mix`."""

    segment: int  # number of the segment
    schedule: schema.Schedule  # of the weights, up to the next segment
    lengths: LengthRange
    first: float  # steps before it
    steps: float
    tokens_before: float
    tokens: float
    sources: tuple[Given, ...]  # those that give something

    @property
    def longest(self) -> int:
        """Inputs of the longest document."""
        return max((one.longest for one in self.sources), default=0)


@dataclass(frozen=True)
class UsedUp:
    """When all documents of a source that a segment takes have been used for the first time."""

    source: str
    lengths: LengthRange  # of the documents
    step: float  # steps before
    tokens: float  # of the run before
    policy: str  # what happens then: repeat, drop or stop


@dataclass(frozen=True)
class Stages:
    """The stages of a run."""

    stages: tuple[Stage, ...]
    used_up: tuple[UsedUp, ...]  # in the order in which it happens
    epochs: Mapping[str, float]  # how often the documents of each source are used
    ended: UsedUp | None  # why the run ends before run.steps; None if it does not


def compile_stages(config: Config, found: Mapping[str, Documents]) -> Stages:
    """Compile the stages of `run.steps` steps from the lengths of the documents of each source, by name.

    Raises DataError as a run does, for a document that no segment takes and a source without any for a segment.
    """
    run = _Run(config, found)
    stages = tuple(run.stages())
    return Stages(stages, tuple(run.used_up.values()), run.epochs, run.ended)


def check_lengths(name: str, inputs: Ints, data: schema.Data) -> None:
    """Raise DataError as a run does, for a document of a source that no segment takes, and a segment without any.

    `inputs` are the lengths of the documents of source `name`: int64 [D], D >= 1.
    """
    if validation_shares(data)[name] == 1:  # no step of training has them
        return
    segments, place = segments_of(data), source_configs(data)[name].path_text
    taken = np.array([(inputs >= one.lengths[0]) & (inputs <= one.lengths[1]) for one in segments])
    if not taken.any(axis=0).all():
        raise never_taken(name, int(inputs[~taken.any(axis=0)][0]), place, [one.lengths for one in segments])
    for segment, takes in zip(segments, taken, strict=True):
        if segment.weights.get(name) and not takes.any():
            raise none_of_lengths(name, place, segment.lengths)


class _Run:
    """A run, a part of a segment at a time. Lengths are in classes, of which a segment takes all documents or none."""

    def __init__(self, config: Config, found: Mapping[str, Documents]) -> None:
        """Raise DataError for a document that no segment takes, and a source without any for one of its segments."""
        self.used_up = dict[str, UsedUp]()
        self.ended: UsedUp | None = None
        self._segments, self._config = segments_of(config.data), config
        self._policy = {name: one.exhausted for name, one in source_configs(config.data).items()}
        lengths = [one.lengths for one in self._segments]
        least = sorted({1, *(edge for one in lengths for edge in (one[0], one[1] + 1))} - {ANY[1] + 1})
        self._takes = [np.array([first <= one <= last for one in least]) for first, last in lengths]  # of classes [C]
        shares = validation_shares(config.data)
        for name, one in found.items():
            check_lengths(name, one.lengths, config.data)
        # Tokens for training, documents and the longest one of each class; see `_of_classes`
        self._classes = {
            name: _of_classes(one, np.array(least), (1 - shares[name]) / one.fraction) for name, one in found.items()
        }
        self._given = {name: np.zeros(len(least)) for name in found}  # tokens of each class so far
        self._step = self._tokens = 0.0

    @property
    def epochs(self) -> dict[str, float]:
        return {
            name: float(given.sum() / tokens.sum()) if (tokens := self._classes[name][0]).any() else 0.0
            for name, given in self._given.items()
        }

    def stages(self) -> Iterator[Stage]:
        for number, segment in enumerate(self._segments):
            following = self._segments[number + 1] if number + 1 < len(self._segments) else None
            schedule = following.schedule if following else "constant"
            step, tokens = self._step, self._tokens
            before = {name: given.copy() for name, given in self._given.items()}
            parts = 1 if schedule == "constant" else _PARTS
            for part in range(1, parts + 1):
                end = (
                    math.inf if following is None else segment.start + (following.start - segment.start) * part / parts
                )
                self._go_on_to(end, number)
            if self._step > step:
                given = {name: self._given[name] - before[name] for name in self._given}
                of = self._tokens - tokens
                sources = tuple(self._gave(name, one, of) for name, one in given.items() if one.any())
                yield Stage(number, schedule, segment.lengths, step, self._step - step, tokens, of, sources)

    def _gave(self, name: str, given: Floats, of: float) -> Given:
        tokens, documents, longest, _ = self._classes[name]
        count = float((given * documents / np.maximum(tokens, 1)).sum())
        return Given(name, float(given.sum()) / of, float(given.sum()), count, int(longest[given > 0].max()))

    def _go_on_to(self, end: float, number: int) -> None:
        """Give documents of a segment until a step or a number of tokens, or the end of the run.

        Weights are those halfway.
        """
        unit, takes, lengths = self._segments[number].unit, self._takes[number], self._segments[number].lengths
        here = self._step if unit == "step" else self._tokens
        middle = int(here if end == math.inf else (here + end) / 2)
        weights = weights_at(self._segments, middle, middle)
        while self.ended is None and self._step < self._config.run.steps:
            rates = self._rates(weights, takes)
            if not rates:  # all sources of the segment have been dropped
                self.ended = [*self.used_up.values()][-1]
                return
            tokens = sum(rates.values())  # of a step
            steps = end - self._step if unit == "step" else (end - self._tokens) / tokens
            steps = min(steps, self._config.run.steps - self._step)
            if steps <= 0:
                return
            # The part ends where a source has been used up: then the others get its weight, or its next epoch begins.
            left = {name: self._left(name, takes) for name in rates}
            until = {name: float(left[name].sum()) / rate for name, rate in rates.items()}
            steps = min(steps, *until.values())
            for name, rate in rates.items():
                self._given[name] += rate * steps * left[name] / left[name].sum()
            for name in (name for name in until if until[name] <= steps):
                self._given[name][takes] = np.maximum(self._given[name], self._classes[name][0])[takes]
                at = self._step + steps, self._tokens + steps * tokens
                one = self.used_up.setdefault(name, UsedUp(name, lengths, *at, self._policy[name]))
                if self._policy[name] == "stop":
                    self.ended = one
            self._step, self._tokens = self._step + steps, self._tokens + steps * tokens

    def _left(self, name: str, takes: NDArray[np.bool_]) -> Floats:
        """Return the tokens of each class that a source gives next: what is left of its epoch. Others of it wait."""
        tokens = np.where(takes, self._classes[name][0], 0.0)
        given = np.where(takes, self._given[name], 0.0)
        epoch = 1.0
        if self._policy[name] == "repeat" and tokens.any():
            epoch += math.floor(float(given.sum() / tokens.sum()) + _ROUNDING)
        left: Floats = np.maximum(tokens * epoch - given, 0.0)
        return np.where(left > _ROUNDING * tokens, left, 0.0)

    def _rates(self, weights: Mapping[str, int], takes: NDArray[np.bool_]) -> dict[str, float]:
        """Return the tokens that each source gives in a step; those that have been used up give none.

        A step leaves on average half of the document that comes next: one of the length of the document of a random
        token, of which the mean of each class stands for all.
        """
        left = {name: weight for name, weight in weights.items() if weight and self._left(name, takes).any()}
        total, batch = sum(left.values()), self._config.batch_tokens
        unfilled = sum(weight / total * self._of_a_token(name, takes) for name, weight in left.items()) / 2
        return {name: weight / total * max(batch - unfilled, batch / 2) for name, weight in left.items()}

    def _of_a_token(self, name: str, takes: NDArray[np.bool_]) -> float:
        """Return the mean length of the document of a token; a document longer than a step is a step by itself."""
        tokens, squares = self._classes[name][0][takes].sum(), self._classes[name][3][takes].sum()
        return float(min(squares / tokens, self._config.batch_tokens)) if tokens else 0.0


def _of_classes(found: Documents, least: Ints, factor: float) -> Floats:
    """Return tokens, documents, the longest document, and the sum of the squares of lengths of each class: [4, C].

    Each document that was read stands for `factor`.
    """
    classes, size = np.searchsorted(least, found.lengths, side="right") - 1, len(least)
    inputs, longest = found.lengths.astype(np.float64), np.zeros(size)
    np.maximum.at(longest, classes, inputs)
    tokens, documents, squares = (
        factor * np.bincount(classes, one, size) for one in (inputs, np.ones(len(inputs)), inputs**2)
    )
    return np.array([tokens, documents, longest, squares])
