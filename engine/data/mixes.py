"""Named mixes of document lengths, for plans and benchmarks without the documents.

Lengths are inputs of documents (tokens). A mix is a function of a random generator, the config and a count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.random import Generator, Philox

from engine.config import schema
from engine.data.steps import piece_bounds
from engine.planner.plan import Ints

_K = 1024
_LONGEST = 2048 * _K  # of the paper's mixes
_DRAWN_FIRST = 4096

# ByteScale, evaluation, GitHub: the share of the *tokens* in documents of a length between two bounds, in percent.
# Stated: up to 2K, 128-256K, 256-512K; 9.8 above 256K; 16.2 above 128K.
# Assumed: the rest is spread evenly over the doublings from 2K to 128K (49.8 over 6) and from 512K to 2M (5.3 over 2);
# no document is shorter than 128 tokens; lengths are log-uniform inside a bucket.
_GITHUB_BOUNDS = np.array([0.125, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]) * _K
_GITHUB_TOKENS = np.array([34.0, 8.3, 8.3, 8.3, 8.3, 8.3, 8.3, 6.4, 4.5, 2.65, 2.65])


def github(random: Generator, lengths: schema.Lengths, count: int) -> Ints:
    """Return document lengths of the paper's GitHub mix, int64[count].

    With `lengths.max` below 2M the mix is scaled to max: every length is multiplied by max / 2M.
    """
    low, high = _GITHUB_BOUNDS[:-1], _GITHUB_BOUNDS[1:]
    mean = (high - low) / np.log(high / low)  # of a log-uniform length
    documents = _GITHUB_TOKENS / mean
    bucket = random.choice(len(low), size=count, p=documents / documents.sum())
    drawn = low[bucket] * (high[bucket] / low[bucket]) ** random.random(count)
    scale = min(lengths.max / _LONGEST, 1.0)
    scaled: Ints = np.maximum(1, drawn * scale).astype(np.int64)
    return scaled


def lognormal(random: Generator, lengths: schema.Lengths, count: int) -> Ints:
    """Return lognormal lengths of documents, int64[count], clipped to 1..max (`mean` is that before clipping)."""
    mu = np.log(lengths.mean) - lengths.sigma**2 / 2
    drawn: Ints = np.rint(random.lognormal(mu, lengths.sigma, count)).clip(1, lengths.max).astype(np.int64)
    return drawn


MIXES: Mapping[str, Callable[[Generator, schema.Lengths, int], Ints]] = {"github": github, "lognormal": lognormal}


def draw_documents(lengths: schema.Lengths, tokens: int, seed: int) -> Ints:
    """Return the document lengths of one step: drawn until the next would pass `tokens`, and at least one."""
    random = Generator(Philox(key=seed))
    drawn = np.empty(0, dtype=np.int64)
    while drawn.sum() <= tokens:
        drawn = np.concatenate([drawn, MIXES[lengths.name](random, lengths, max(_DRAWN_FIRST, len(drawn)))])
    fitting = int(np.searchsorted(np.cumsum(drawn), tokens, side="right"))
    return drawn[: max(1, fitting)]


def draw(lengths: schema.Lengths, batch_tokens: int, context: int, seed: int) -> Ints:
    """Return the sequence lengths of one step of a mix, int64[S]: its documents, cut at `context`."""
    return piece_bounds(draw_documents(lengths, batch_tokens, seed), context)[2]


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
