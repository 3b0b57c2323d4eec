"""What a recipe's lengths look like, and which capacity and largest ring they ask for. Needs no GPU.

Letters: N documents, S sequences (documents cut at the context), P ranks, C capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator, Philox

from engine.config.schema import Config
from engine.config.units import format_count
from engine.data.lengths import packed, read_lengths, step_lengths
from engine.data.mixes import MIXES
from engine.data.scan import Documents, Progress, scan
from engine.errors import ConfigError
from engine.planner.plan import Ints
from engine.planner.settings import PlanSettings

_K = 1024
_DRAWN = 1 << 20  # documents of a mix
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True)
class Suggestion:
    """A capacity (tokens), the largest ring (ranks), and which bound decided the capacity."""

    capacity: int
    ring_limit: int
    reason: str
    fits: bool  # whether the context fits these ranks' memory at that capacity


def documents(config: Config, sample: int | None, progress: Progress = lambda share: None) -> Documents:
    """Return the documents that `lengths` says: the recipe's own (`scan`), a file's, or 1M drawn from a mix.

    `sample` documents are read or drawn instead, if it is given. Raises DataError for a source that cannot be used.
    """
    source = config.lengths
    if source.name == "data":
        return scan(config.data, sample, config.run.seed, progress)
    if source.name == "file":
        if sample is not None:
            raise ConfigError("a file of lengths is read whole", key="--sample", hint="leave it out")
        return Documents(read_lengths(Path(str(source.path))))
    random = Generator(Philox(key=config.run.seed))
    return Documents(MIXES[source.name](random, source, sample or _DRAWN))


def a_step(config: Config, found: Documents) -> Ints:
    """Return the sequence lengths [S] of one step: the first that `plan` draws.

    Of a recipe's own documents it is a random one: training takes them in an order that only an index of all gives.
    """
    if config.lengths.name != "data":
        return next(step_lengths(config, 1))
    shuffled = Generator(Philox(key=config.run.seed)).permutation(found.lengths)
    return next(islice(packed(shuffled, config.batch_tokens, config.context), 1))


def describe(found: Documents, context: int) -> dict[str, Any]:
    """Return counts, percentiles and buckets (`upto` doubles); counts of a sample are extrapolated to its source.

    All but `sequences` are of documents before they are cut.
    """
    lengths, tokens = found.lengths, int(found.lengths.sum())
    sizes, counts = np.unique(lengths, return_counts=True)
    ranks = {name: _quantile(sizes, counts, share) for name, share in _PERCENTILES.items()}
    return {
        "samples": round(len(lengths) / found.share),
        "sequences": round(int(_sequences(lengths, context)[1].sum()) / found.share),
        "tokens": round(tokens / found.share),
        "mean": tokens / len(lengths),
        **ranks,
        "max": int(lengths.max()),
        "empty": round(found.empty / found.share),
        "read": {"samples": len(lengths), "tokens": tokens, "share": found.share},
        "buckets": _buckets(lengths, found.share),
    }


def suggest(lengths: Ints, config: Config, settings: PlanSettings) -> Suggestion:
    """Return the capacity and the largest ring that documents of `lengths` [N] ask for on these ranks.

    A larger capacity cuts fewer sequences, so that less travels in rings and kernels are larger; and it needs memory.
    What is useful ends where 99 % of the sequences are whole on one rank, and a rank's share of a step, batch_tokens /
    P, is one micro-batch: the larger of the two is suggested, rounded up to 1K. But no more than fits the device (all
    of it in rings, nothing offloaded), rounded down to 1K; and no less than context / P, or the context does not fit.

    The largest ring is the needed degree of the longest sequence: ceil(s / C) ranks to hold it, and ceil(cost(s) /
    mean cost of a rank's step) to let the others not wait for it; P at most.
    """
    sizes, counts = _sequences(lengths, config.context)
    ranks, costs = settings.ranks, settings.costs
    uncut, share = _quantile(sizes, counts, 0.99), -(-config.batch_tokens // ranks)
    least, most = -(-config.context // ranks), costs.most_tokens(settings.device_memory)
    asked = _round(max(uncut, share), up=True)
    if min(asked, most) < least:
        capacity, reason = least, f"context / ranks: less cannot hold {format_count(config.context)}"
    elif most < asked:
        capacity, reason = max(least, _round(most, up=False)), "the most that fits the device"
    elif uncut >= share:
        capacity, reason = asked, "99 % of the sequences are whole on one rank"
    else:
        capacity, reason = asked, "a rank's share of a step is one micro-batch"
    price = costs.sequence(sizes).astype(np.float64)
    per_token = float(price @ counts) / float(sizes.astype(np.float64) @ counts)
    held, shared = sizes[-1] / max(1, capacity), price[-1] / (per_token * config.batch_tokens / ranks)
    ring = min(ranks, int(np.ceil(max(held, shared))))
    return Suggestion(capacity, ring, reason, fits=0 < capacity <= most)


def _sequences(lengths: Ints, context: int) -> tuple[Ints, Ints]:
    """Return the different lengths of the sequences, ascending, and how many there are of each: never all pieces."""
    rest, whole = lengths % context, int((lengths // context).sum())
    sizes, counts = np.unique(rest[rest > 0], return_counts=True)
    if whole:
        sizes, counts = np.append(sizes, context), np.append(counts, whole)
    return sizes.astype(np.int64), counts.astype(np.int64)


def _quantile(sizes: Ints, counts: Ints, share: float) -> int:
    """Return the smallest length that at least `share` of all do not pass, of ascending sizes and how many of each."""
    below = np.cumsum(counts)
    return int(sizes[np.searchsorted(below, share * below[-1])])


def _round(tokens: int, *, up: bool) -> int:
    """Return a multiple of 1K; what is less than 1K stays."""
    return tokens if tokens < _K else (-(-tokens // _K) if up else tokens // _K) * _K


def _buckets(lengths: Ints, share: float) -> list[dict[str, int]]:
    """Return documents and tokens of lengths up to each power of two, from the shortest document's to the longest's."""
    power = np.ceil(np.log2(lengths)).astype(np.int64)  # exact: log2 of a power of two is whole
    documents, tokens = np.bincount(power), np.bincount(power, weights=lengths)
    return [
        {"upto": 2**p, "samples": round(documents[p] / share), "tokens": round(tokens[p] / share)}
        for p in range(int(power.min()), int(power.max()) + 1)
    ]
