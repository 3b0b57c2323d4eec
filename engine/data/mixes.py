"""Named mixes of document lengths, for plans and benchmarks without documents.

Lengths are numbers of inputs per document (tokens). A mix is a function that draws the lengths of `count` documents,
from a random generator and the `lengths` section of the config.

Letters: N documents of a step, S sequences of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator, Philox

from engine.config import schema
from engine.data.sequences import fitting, piece_bounds
from engine.units import Floats, Ints

_K = 1024
_LONGEST = 2048 * _K  # longest document of the paper's mixes
_FEWEST_DRAWN = 4096


@dataclass(frozen=True)
class _Parts:
    """A mix of several parts. In each part, lengths from low to high have the density length^-(1 + exponent).

    An exponent of 0 is log-uniform: each doubling of the length has equally many documents.
    """

    low: Floats
    high: Floats
    documents: Floats  # fraction of the documents in each part; sums to 1
    exponent: Floats

    def draw(self, random: Generator, longest: int, count: int) -> Ints:
        """Draw document lengths, int64 [count]. If `longest` is below 2M, lengths are multiplied by longest / 2M."""
        part = random.choice(len(self.low), size=count, p=self.documents)
        low, high, exponent = self.low[part], self.high[part], self.exponent[part]
        uniform = random.random(count)
        with np.errstate(divide="ignore", invalid="ignore"):  # np.where evaluates both branches
            power = low * (1 - uniform * (1 - (low / high) ** exponent)) ** (-1 / exponent)
        drawn = np.where(exponent == 0, low * (high / low) ** uniform, power)
        scaled: Ints = np.maximum(1, drawn * min(longest / _LONGEST, 1.0)).astype(np.int64)
        return scaled


def github(random: Generator, lengths: schema.Lengths, count: int) -> Ints:
    """Draw document lengths, int64 [count], from the paper's GitHub mix (ByteScale, evaluation, GitHub).

    If `lengths.max` is below 2M, all lengths are scaled by lengths.max / 2M. The percentages below are of *tokens* in
    documents with a length in the given range.
    The paper states: 34.0 up to 2K, 6.4 in 128-256K, 4.5 in 256-512K, 9.8 above 256K, 16.2 above 128K.
    We assume: the rest is spread evenly over the doublings from 2K to 128K (49.8 over 6) and from 512K to 2M (5.3 over
    2); no document is shorter than 128 tokens; lengths are log-uniform within each range.
    """
    bounds = np.array([0.125, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]) * _K
    tokens = np.array([34.0, 8.3, 8.3, 8.3, 8.3, 8.3, 8.3, 6.4, 4.5, 2.65, 2.65])
    low, high = bounds[:-1], bounds[1:]
    mean = (high - low) / np.log(high / low)  # mean of a log-uniform length
    documents = tokens / mean
    parts = _Parts(low, high, documents / documents.sum(), np.zeros(len(low)))
    return parts.draw(random, lengths.max, count)


def byted(random: Generator, lengths: schema.Lengths, count: int) -> Ints:
    """Draw document lengths, int64 [count], from the paper's Byted mix (ByteScale, evaluation, Byted).

    If `lengths.max` is below 2M, all lengths are scaled by lengths.max / 2M.
    The paper states: about 80 % of the documents have up to 4K tokens; the 1 % with 128K or more contain 44.3 % of the
    tokens; documents above 256K contain 37 % of the tokens; the 0.05 % that reach 2M contain 12.1 % of the tokens.
    We assume: documents that reach 2M have exactly 2M tokens, because documents are split at the longest context, so
    the mean is 8,666 tokens; no document is shorter than 128 tokens; lengths are log-uniform up to 4K and follow a
    power law in each range above. The stated figures then determine the exponents (one for both ranges from 128K to
    2M), and how many of the 0.95 % of documents between 128K and 2M are above 256K.
    """
    parts = [
        (0.125, 4, 0.80, 0.0),  # 10.6 % of the tokens
        (4, 128, 0.19, 0.62436),  # 45.1 %
        (128, 256, 0.0037812, 3.2116),  # 7.3 %
        (256, 2048, 0.0057188, 3.2116),  # 24.9 %
        (2048, 2048, 0.0005, 0.0),  # 12.1 %
    ]
    low, high, documents, exponent = np.array(parts).T
    return _Parts(low * _K, high * _K, documents, exponent).draw(random, lengths.max, count)


def lognormal(random: Generator, lengths: schema.Lengths, count: int) -> Ints:
    """Draw lognormal document lengths, int64 [count], clipped to 1 .. lengths.max.

    `lengths.mean` is the mean before clipping, `lengths.sigma` the standard deviation of the logarithm.
    """
    # exp(mu + sigma^2 / 2) is the mean of a lognormal distribution.
    mu = np.log(lengths.mean) - lengths.sigma**2 / 2
    drawn: Ints = np.rint(random.lognormal(mu, lengths.sigma, count)).clip(1, lengths.max).astype(np.int64)
    return drawn


def equal(random: Generator, lengths: schema.Lengths, count: int) -> Ints:
    """Return document lengths, int64 [count], which are all lengths.max."""
    return np.full(count, lengths.max, dtype=np.int64)


MIXES: Mapping[str, Callable[[Generator, schema.Lengths, int], Ints]] = {
    "github": github,
    "byted": byted,
    "lognormal": lognormal,
    "equal": equal,
}


def draw_documents(lengths: schema.Lengths, tokens: int, seed: int, step: int = 0) -> Ints:
    """Draw the document lengths, int64 [N], of one step from a mix.

    Adds documents until the next would exceed `tokens`, but at least one. Equal `seed` and `step` give equal lengths.
    """
    # The key contains seed and step separately: with their sum, different seeds would share steps.
    random = Generator(Philox(key=np.array([seed, step], dtype=np.uint64)))
    drawn = np.empty(0, dtype=np.int64)
    while drawn.sum() <= tokens:
        drawn = np.concatenate([drawn, MIXES[lengths.name](random, lengths, max(_FEWEST_DRAWN, len(drawn)))])
    return drawn[: fitting(drawn, tokens)]


def draw(lengths: schema.Lengths, batch_tokens: int, context: int, seed: int, step: int = 0) -> Ints:
    """Draw the sequence lengths, int64 [S], of one step from a mix: its documents, split at `context`.

    Equal `seed` and `step` give equal lengths.
    """
    return piece_bounds(draw_documents(lengths, batch_tokens, seed, step), context)[2]
