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
from functools import cached_property

import numpy as np

from engine.config import schema
from engine.config.schema import Config
from engine.config.sources import source_configs
from engine.data.mixture import segments_of, weights_at
from engine.data.opening import validation_shares
from engine.data.scan import Documents

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
    """When all documents of a source have been used for the first time."""

    source: str
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
    """Compile the stages of `run.steps` steps from the lengths of the documents of each source, by name."""
    run = _Run(config, found)
    stages = tuple(run.stages())
    return Stages(stages, tuple(run.used_up.values()), run.epochs, run.ended)


class _Run:
    """A run, a part of a segment at a time."""

    def __init__(self, config: Config, found: Mapping[str, Documents]) -> None:
        self.used_up = dict[str, UsedUp]()
        self.ended: UsedUp | None = None
        self._segments, self._config, self._found = segments_of(config.data), config, found
        self._policy = {name: one.exhausted for name, one in source_configs(config.data).items()}
        shares = validation_shares(config.data)
        self._all = {
            name: one.tokens / one.fraction * (1 - shares[name]) for name, one in found.items()
        }  # for training
        self._given = dict.fromkeys(found, 0.0)  # tokens so far
        self._step = self._tokens = 0.0

    @property
    def epochs(self) -> dict[str, float]:
        return {name: given / self._all[name] if self._all[name] else 0.0 for name, given in self._given.items()}

    def stages(self) -> Iterator[Stage]:
        for number, segment in enumerate(self._segments):
            following = self._segments[number + 1] if number + 1 < len(self._segments) else None
            schedule = following.schedule if following else "constant"
            step, tokens, before = self._step, self._tokens, dict(self._given)
            parts = 1 if schedule == "constant" else _PARTS
            for part in range(1, parts + 1):
                end = (
                    math.inf if following is None else segment.start + (following.start - segment.start) * part / parts
                )
                self._go_on_to(end, segment.unit)
            if self._step > step:
                given = {name: self._given[name] - before[name] for name in self._given}
                sources = tuple(self._gave(name, one, self._tokens - tokens) for name, one in given.items() if one)
                yield Stage(number, schedule, step, self._step - step, tokens, self._tokens - tokens, sources)

    def _gave(self, name: str, tokens: float, of: float) -> Given:
        lengths = self._found[name].lengths
        return Given(name, tokens / of, tokens, tokens / float(lengths.mean()), int(lengths.max()))

    def _go_on_to(self, end: float, unit: str) -> None:
        """Give documents until a step or a number of tokens, or the end of the run, with the weights halfway."""
        here = self._step if unit == "step" else self._tokens
        middle = int(here if end == math.inf else (here + end) / 2)
        weights = weights_at(self._segments, middle, middle)
        while self.ended is None and self._step < self._config.run.steps:
            rates = self._rates(weights)
            if not rates:  # all sources of the segment have been dropped
                self.ended = [*self.used_up.values()][-1]
                return
            tokens = sum(rates.values())  # of a step
            steps = end - self._step if unit == "step" else (end - self._tokens) / tokens
            steps = min(steps, self._config.run.steps - self._step)
            if steps <= 0:
                return
            # The part ends where a source has been used up that is not repeated: then the others get its weight.
            until = {
                name: max(0.0, self._all[name] - self._given[name]) / rate
                for name, rate in rates.items()
                if name not in self.used_up
            }
            steps = min([steps, *(at for name, at in until.items() if self._policy[name] != "repeat")])
            for name in sorted((name for name in until if until[name] <= steps), key=lambda name: until[name]):
                at = self._step + until[name], self._tokens + until[name] * tokens
                self.used_up[name] = UsedUp(name, *at, self._policy[name])
                if self._policy[name] == "stop":
                    self.ended = self.used_up[name]
            for name, rate in rates.items():
                self._given[name] += rate * steps
            self._step, self._tokens = self._step + steps, self._tokens + steps * tokens

    def _rates(self, weights: Mapping[str, int]) -> dict[str, float]:
        """Return the tokens that each source gives in a step; those that have been used up give none.

        A step leaves on average half of the document that comes next: one of the length of the document of a random
        token.
        """
        gone = {name for name, one in self.used_up.items() if one.policy != "repeat"}
        left = {name: weight for name, weight in weights.items() if weight and name not in gone}
        total, batch = sum(left.values()), self._config.batch_tokens
        open_ = sum(weight / total * self._of_a_token[name] for name, weight in left.items()) / 2
        return {name: weight / total * max(batch - open_, batch / 2) for name, weight in left.items()}

    @cached_property
    def _of_a_token(self) -> dict[str, float]:
        """The mean length of the document of a token of each source; a longer one than a step is a step by itself."""
        batch, found = self._config.batch_tokens, dict[str, float]()
        for name, one in self._found.items():
            lengths = np.minimum(one.lengths, batch).astype(np.float64)
            found[name] = float((lengths**2).sum() / lengths.sum())
        return found
