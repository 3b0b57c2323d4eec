"""The settings that `tune` chooses between: layouts, offload, and for each of them some capacities."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from itertools import product
from operator import attrgetter
from typing import Any

from engine.config.schema import Config
from engine.family.families import family_of
from engine.fit.largest import largest_capacity
from engine.job import Job
from engine.planner.settings import PlanSettings

SEARCHED = ("parallel.tp", "parallel.pp", "parallel.ep", "zero.stage", "recompute", "offload.ratio", "capacity")
_DEGREES = (1, 2, 4, 8, 16)
_ROUND = 1024  # tokens: capacities are multiples of this, which are easier to read


def layouts(config: Config, fixed: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield values of all searched keys except the capacity; `fixed` keys have their value of the config.

    Other keys have it too, beside the usual ones, so that the config itself is always among them. tp divides the
    heads and stays inside a node; pp divides the layers; ep divides the experts, if the model has some. Rules of the
    config are checked by the caller, except that ep > 1 is combined with neither tp, pp nor ZeRO-3 unless it is fixed.
    """
    model, node = config.model, config.cluster.ranks_per_node
    values: dict[str, tuple[Any, ...]] = {
        "parallel.tp": tuple(n for n in _DEGREES if n <= node and model.heads % n == model.kv_heads % n == 0),
        "parallel.pp": tuple(n for n in _DEGREES if model.layers % n == 0),
        "parallel.ep": tuple(n for n in _DEGREES if model.experts % n == 0),
        "zero.stage": (1, 2, 3),
        "recompute": ("none", "layer_keep_attention", "layer"),
        "offload.ratio": (0.0, "auto"),
    }
    if not family_of(model).experts and "parallel.ep" not in fixed:
        del values["parallel.ep"]  # not a key that the table should name
    for key, others in values.items():
        own = attrgetter(key)(config)
        values[key] = (own,) if key in fixed else tuple(dict.fromkeys((*others, own)))
    for chosen in product(*values.values()):
        changes = dict(zip(values, chosen, strict=True))
        other_sharding = changes["parallel.tp"] * changes["parallel.pp"] > 1 or changes["zero.stage"] == 3
        if other_sharding and changes.get("parallel.ep", 1) > 1 and "parallel.ep" not in fixed:
            continue  # breaks a rule; checking these too would take three times as long as all others
        if config.zero.weights_on_host and changes["zero.stage"] < 3:
            changes["zero.weights_on_host"] = False  # only ZeRO-3 can keep weights there
        yield changes


def capacities(job: Job) -> list[int]:
    """Capacities to try, the largest first; empty if no capacity fits.

    A large capacity has few micro-batches and short rings; a small one balances better, and has shorter bubbles in a
    pipeline. No rank needs more than its part of a step, except for a long sequence.
    """
    config, settings = job.config, job.settings
    ratio = 0 if config.offload.ratio == "auto" else settings.offload
    largest, plain = largest_capacity(settings, ratio), largest_capacity(settings.without_offload())
    even = min(plain, -(-config.batch_tokens // settings.ranks))
    needed = -(-config.context // settings.ranks)  # of each rank, for a sequence as long as the context
    found = {_rounded(size // part) for size in (plain, even) for part in (1, 2, 4, 8)}
    found |= {_rounded(largest), _rounded(largest // 2), config.capacity}
    if _rounded(largest) < needed:
        found.add(needed)
    return sorted((size for size in found if 0 < size <= largest), reverse=True)


def more_capacities(settings: PlanSettings) -> list[int]:
    """Capacities from the largest that fits to an eighth of it, in steps of 4 %."""
    largest, step = largest_capacity(settings), 0.96
    count = math.ceil(math.log(1 / 8, step))
    return sorted({_rounded(round(largest * step**power)) for power in range(count)} - {0}, reverse=True)


def _rounded(tokens: int) -> int:
    return tokens - tokens % _ROUND if tokens > _ROUND else tokens
