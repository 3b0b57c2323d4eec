"""Named mixes of document lengths, for plans and benchmarks without the documents.

Lengths are inputs of documents (tokens). A mix is a function of a random generator, the config and a count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from engine.config import schema
from engine.data.steps import fitting, piece_bounds
from engine.planner.plan import Ints

Floats = NDArray[np.float64]

_K = 1024
_LONGEST = 2048 * _K  # of the paper's mixes
_DRAWN_FIRST = 4096


@dataclass(frozen=True)
class _Parts:
    """A mix in parts: a share of the documents has lengths from low to high, of density length^-(1 + fall).

    A fall of 0 is log-uniform: as many documents in each doubling.
    """

    low: Floats
    high: Floats
    documents: Floats  # sums to 1
    fall: Floats

    def draw(self, random: Generator, longest: int, count: int) -> Ints:
        """Return lengths of documents, int64[count]; below 2M every length is multiplied by longest / 2M."""
        part = random.choice(len(self.low), size=count, p=self.documents)
        low, high, fall = self.low[part], self.high[part], self.fall[part]
        place = random.random(count)
        with np.errstate(divide="ignore", invalid="ignore"):  # the other branch of `where`
            falling = low * (1 - place * (1 - (low / high) ** fall)) ** (-1 / fall)
        drawn = np.where(fall == 0, low * (high / low) ** place, falling)
        scaled: Ints = np.maximum(1, drawn * min(longest / _LONGEST, 1.0)).astype(np.int64)
        return scaled


def _github() -> _Parts:
    """ByteScale, evaluation, GitHub: the share of the *tokens* in documents of a length between two bounds, in percent.

    Stated: 34.0 up to 2K, 6.4 in 128-256K, 4.5 in 256-512K, 9.8 above 256K, 16.2 above 128K.
    Assumed: the rest is spread evenly over the doublings from 2K to 128K (49.8 over 6) and from 512K to 2M (5.3 over
    2); no document is shorter than 128 tokens; lengths are log-uniform inside a part.
    """
    bounds = np.array([0.125, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]) * _K
    tokens = np.array([34.0, 8.3, 8.3, 8.3, 8.3, 8.3, 8.3, 6.4, 4.5, 2.65, 2.65])
    low, high = bounds[:-1], bounds[1:]
    mean = (high - low) / np.log(high / low)  # of a log-uniform length
    documents = tokens / mean
    return _Parts(low, high, documents / documents.sum(), np.zeros(len(low)))


def _byted() -> _Parts:
    """ByteScale, evaluation, Byted.

    Stated: about 80 % of the documents have up to 4K; 1 % have 128K or more, and 44.3 % of the tokens; 37 % of the
    tokens are in documents above 256K; 0.05 % of the documents reach 2M and have 12.1 % of the tokens. If these have 2M
    each, the mean is 8,666 tokens.
    Assumed: they do, as documents are cut at the longest context; no document is shorter than 128 tokens; up to 4K
    lengths are log-uniform; above, each part falls by a power of the length. What is stated then fixes the falls
    (one for both parts from 128K to 2M) and how the 0.95 % split at 256K.
    """
    parts = [
        (0.125, 4, 0.80, 0.0),  # 10.6 % of the tokens
        (4, 128, 0.19, 0.62436),  # 45.1 %
        (128, 256, 0.0037812, 3.2116),  # 7.3 %
        (256, 2048, 0.0057188, 3.2116),  # 24.9 %
        (2048, 2048, 0.0005, 0.0),  # 12.1 %
    ]
    low, high, documents, fall = np.array(parts).T
    return _Parts(low * _K, high * _K, documents, fall)


_GITHUB, _BYTED = _github(), _byted()


def github(random: Generator, lengths: schema.Lengths, count: int) -> Ints:
    """Return document lengths of the paper's GitHub mix, int64[count], scaled if `lengths.max` is below 2M."""
    return _GITHUB.draw(random, lengths.max, count)


def byted(random: Generator, lengths: schema.Lengths, count: int) -> Ints:
    """Return document lengths of the paper's Byted mix, int64[count], scaled if `lengths.max` is below 2M."""
    return _BYTED.draw(random, lengths.max, count)


def lognormal(random: Generator, lengths: schema.Lengths, count: int) -> Ints:
    """Return lognormal lengths of documents, int64[count], clipped to 1..max (`mean` is that before clipping)."""
    mu = np.log(lengths.mean) - lengths.sigma**2 / 2
    drawn: Ints = np.rint(random.lognormal(mu, lengths.sigma, count)).clip(1, lengths.max).astype(np.int64)
    return drawn


MIXES: Mapping[str, Callable[[Generator, schema.Lengths, int], Ints]] = {
    "github": github,
    "byted": byted,
    "lognormal": lognormal,
}


def draw_documents(lengths: schema.Lengths, tokens: int, seed: int, step: int = 0) -> Ints:
    """Return the document lengths of one step: drawn until the next would pass `tokens`, and at least one.

    Steps of a seed, and any two seeds, are independent of each other: a sum of both would give one step to several.
    """
    random = Generator(Philox(key=np.array([seed, step], dtype=np.uint64)))
    drawn = np.empty(0, dtype=np.int64)
    while drawn.sum() <= tokens:
        drawn = np.concatenate([drawn, MIXES[lengths.name](random, lengths, max(_DRAWN_FIRST, len(drawn)))])
    return drawn[: fitting(drawn, tokens)]


def draw(lengths: schema.Lengths, batch_tokens: int, context: int, seed: int, step: int = 0) -> Ints:
    """Return the sequence lengths of one step of a mix, int64[S]: its documents, cut at `context`."""
    return piece_bounds(draw_documents(lengths, batch_tokens, seed, step), context)[2]


def write_jsonl(path: Path, lengths: Iterable[int], text: bytes, seed: int) -> None:
    """Write documents of the given lengths (inputs, 2 or more), cut from random places of a text, around its end.

    Bytes that are not ASCII become `?`, so that a cut never splits a character and a length stays what was asked.
    """
    ascii_ = np.frombuffer(text, dtype=np.uint8)
    ascii_ = np.where(ascii_ < 128, ascii_, ord("?")).astype(np.uint8)
    random = Generator(Philox(key=seed))
    with path.open("w", encoding="utf-8") as file:
        for length in lengths:
            places = (random.integers(len(ascii_)) + np.arange(length - 1)) % len(ascii_)  # BOS is the other input
            file.write(json.dumps({"text": ascii_[places].tobytes().decode("ascii")}) + "\n")
