"""Statistics of document lengths, and the capacity and largest ring that suit them. Needs no GPU.

Letters: N documents, S sequences (documents split at the context), P ranks, C capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.config.schema import Config
from engine.config.units import format_count
from engine.data.scan import Documents
from engine.planner.settings import PlanSettings
from engine.units import Ints

_K = 1024
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

    `samples` counts documents, `sequences` their pieces after splitting at `context`. `buckets` is the histogram: each
    bucket contains lengths above half of `upto`, up to `upto`. If `found` is a sample, counts are extrapolated to the
    whole source; `read` contains the actual numbers.
    """
    lengths, tokens = found.lengths, int(found.lengths.sum())
    sizes, counts = np.unique(lengths, return_counts=True)
    power = np.ceil(np.log2(lengths)).astype(np.int64)  # exact: log2 of a power of two is a whole number
    documents, inside = np.bincount(power), np.bincount(power, weights=lengths)
    return {
        "samples": round(len(lengths) / found.fraction),
        "sequences": round(int(_sequences(lengths, context)[1].sum()) / found.fraction),
        "tokens": round(tokens / found.fraction),
        "mean": tokens / len(lengths),
        **{name: _quantile(sizes, counts, fraction) for name, fraction in _PERCENTILES.items()},
        "max": int(lengths.max()),
        "empty": round(found.empty / found.fraction),
        "read": {"samples": len(lengths), "tokens": tokens, "share": found.fraction},
        "buckets": [
            {"upto": 2**p, "samples": round(documents[p] / found.fraction), "tokens": round(inside[p] / found.fraction)}
            for p in range(int(power.min()), int(power.max()) + 1)
        ],
    }


def suggest(lengths: Ints, config: Config, settings: PlanSettings, largest: int) -> Suggestion:
    """Suggest a capacity and a largest ring for documents of `lengths` [N] on the ranks of `config`.

    A larger capacity splits fewer sequences over rings, which means less communication and larger kernels, but it needs
    more memory. It has no further benefit once 99 % of the sequences fit on one rank, and a rank's part of a step
    (batch_tokens / P) fits in one micro-batch. So the suggested capacity is the larger of these two sizes, rounded up
    to 1K. Its upper bound is the largest capacity that fits without offload, if all sequences are in rings, rounded
    down to 1K. Its lower bound, which takes precedence, is context / P. The lower bound may need offload; it fits if it
    is at most `largest`, the largest capacity that fits with offload (engine/fit/largest.py).

    The largest ring is the degree that the longest sequence, of s tokens, needs: at least s / C ranks to fit in memory,
    and at least cost(s) / (mean cost of a rank's part of a step) so that other ranks do not wait for it; at most P.
    """
    sizes, counts = _sequences(lengths, config.context)
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


def _sequences(lengths: Ints, context: int) -> tuple[Ints, Ints]:
    """Split documents of `lengths` at `context`; return the distinct sequence lengths, ascending, and their counts."""
    rest, full = lengths % context, int((lengths // context).sum())
    sizes, counts = np.unique(rest[rest > 0], return_counts=True)
    if full:
        sizes, counts = np.append(sizes, context), np.append(counts, full)
    return sizes.astype(np.int64), counts.astype(np.int64)


def _quantile(sizes: Ints, counts: Ints, fraction: float) -> int:
    """Return the smallest size that at least `fraction` of the items do not exceed.

    `sizes` are distinct and ascending; `counts[i]` items have size `sizes[i]`.
    """
    below = np.cumsum(counts)
    return int(sizes[np.searchsorted(below, fraction * below[-1])])


def _round(tokens: int, *, up: bool) -> int:
    """Round to a multiple of 1K; numbers below 1K are returned unchanged."""
    return tokens if tokens < _K else (-(-tokens // _K) if up else tokens // _K) * _K
