"""Statistics of document lengths, and the capacity and largest ring that suit them. Needs no GPU.

Letters: N documents, S sequences (documents split at the context), P ranks, C capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.config.units import format_count
from engine.data.scan import Documents
from engine.job import Job
from engine.units import Floats, Ints

_K = 1024
_ROUNDING = 1e-12  # relative error of sums of counts, which are not integers in a mixture
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True)
class Suggestion:
    """A suggested capacity and largest ring. `reason` names the bound that determines the capacity."""

    capacity: int  # tokens
    ring_limit: int  # ranks
    reason: str
    fits: bool  # whether the context fits in the memory of the ranks at this capacity


def describe(found: Documents, context: int) -> dict[str, Any]:
    """Compute counts, percentiles and a histogram of document lengths in tokens.

    `samples` counts documents, `sequences` their pieces after splitting at `context`. If `found` is a sample, counts
    are extrapolated to the whole source; `read` contains the actual numbers. See `histogram`.
    """
    lengths, counts = found.lengths, found.counts
    return histogram(*_tally(lengths, counts), found.fraction) | {
        "sequences": round(float(_sequences(lengths, counts, context)[1].sum()) / found.fraction),
        "empty": round(found.empty / found.fraction),
        "dropped": round(found.dropped / found.fraction),
        "read": {"samples": len(lengths), "tokens": found.tokens, "share": found.fraction},
    }


def histogram(sizes: Ints, counts: Ints | Floats, fraction: float = 1.0) -> dict[str, Any]:
    """Compute numbers, percentiles and a histogram of lengths: `counts[i]` documents have `sizes[i]` tokens.

    `sizes` are distinct, ascending and at least 1. Each of the `buckets` contains lengths above half of `upto`, up to
    `upto`. If only a `fraction` of the documents was read, numbers of documents and tokens are extrapolated.
    """
    power = np.ceil(np.log2(sizes)).astype(np.int64)  # exact: log2 of a power of two is a whole number
    documents, inside = np.bincount(power, weights=counts), np.bincount(power, weights=sizes * counts)
    samples, tokens = counts.sum().item(), (sizes * counts).sum().item()
    return {
        "samples": round(samples / fraction),
        "tokens": round(tokens / fraction),
        "mean": tokens / samples,
        **{name: _quantile(sizes, counts, share) for name, share in _PERCENTILES.items()},
        "max": int(sizes[-1]),
        "buckets": [
            {"upto": 2**p, "samples": round(documents[p] / fraction), "tokens": round(inside[p] / fraction)}
            for p in range(int(power.min()), int(power.max()) + 1)
        ],
    }


def suggest(found: Documents, job: Job, largest: int) -> Suggestion:
    """Suggest a capacity and a largest ring for the documents `found` on the ranks of `job`.

    A larger capacity splits fewer sequences over rings, which means less communication and larger kernels, but it needs
    more memory. It has no further benefit once 99 % of the sequences fit on one rank, and a rank's part of a step
    (batch_tokens / P) fits in one micro-batch. So the suggested capacity is the larger of these two sizes, rounded up
    to 1K. Its upper bound is the largest capacity that fits without offload, if all sequences are in rings, rounded
    down to 1K. Its lower bound, which takes precedence, is context / P. The lower bound may need offload; it fits if it
    is at most `largest`, the largest capacity that fits with offload (engine/fit/largest.py).

    The largest ring is the degree that the longest sequence, of s tokens, needs: at least s / C ranks to fit in memory,
    and at least cost(s) / (mean cost of a rank's part of a step) so that other ranks do not wait for it; at most P.
    """
    config, settings = job.config, job.settings
    sizes, counts = _sequences(found.lengths, found.counts, config.context)
    ranks, costs = settings.ranks, settings.costs
    p99, per_rank = _quantile(sizes, counts, 0.99), -(-config.batch_tokens // ranks)
    least, most = -(-config.context // ranks), costs.most_tokens(settings.device_memory)
    wanted = _round(max(p99, per_rank), up=True)
    if min(wanted, most) < least:
        capacity, reason = least, f"context / ranks: a smaller capacity cannot hold {format_count(config.context)}"
    elif most < wanted:
        # Rounding down must not go below the lower bound.
        capacity, reason = max(least, _round(most, up=False)), "the most that fits without offload"
    elif p99 >= per_rank:
        capacity, reason = wanted, "99% of the sequences fit on one rank"
    else:
        capacity, reason = wanted, "each rank runs its part of a step as one micro-batch"
    price = costs.sequence(sizes).astype(np.float64)
    per_token = float(price @ counts) / float(sizes.astype(np.float64) @ counts)
    held, balanced = sizes[-1] / max(1, capacity), price[-1] / (per_token * config.batch_tokens / ranks)
    ring = min(ranks, int(np.ceil(max(held, balanced))))
    return Suggestion(capacity, ring, reason, fits=0 < capacity <= largest)


def _tally(lengths: Ints, counts: Floats) -> tuple[Ints, Floats]:
    """Return the distinct lengths, ascending, and the sum of the counts of each."""
    sizes, index = np.unique(lengths, return_inverse=True)
    return sizes, np.bincount(index, weights=counts, minlength=len(sizes)).astype(np.float64)


def _sequences(lengths: Ints, counts: Floats, context: int) -> tuple[Ints, Floats]:
    """Split documents at `context`; return the distinct sequence lengths, ascending, and the count of each.

    `lengths[i]` is that of `counts[i]` documents.
    """
    rest, full = lengths % context, float((lengths // context * counts).sum())
    sizes, numbers = _tally(rest[rest > 0], counts[rest > 0])
    if full:
        sizes, numbers = np.append(sizes, context), np.append(numbers, full)
    return sizes.astype(np.int64), numbers


def _quantile(sizes: Ints, counts: Ints | Floats, fraction: float) -> int:
    """Return the smallest size that at least `fraction` of the items do not exceed.

    `sizes` are distinct and ascending; `counts[i]` items have size `sizes[i]`.
    """
    below = np.cumsum(counts)
    return int(sizes[np.searchsorted(below, fraction * below[-1] * (1 - _ROUNDING))])


def _round(tokens: int, *, up: bool) -> int:
    """Round to a multiple of 1K; numbers below 1K are returned unchanged."""
    return tokens if tokens < _K else (-(-tokens // _K) if up else tokens // _K) * _K
