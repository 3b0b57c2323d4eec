"""Suggest changes of config keys that make a config fit in memory, each checked by an estimate, the cheapest first.

The cost of a change is the modelled time of a perfectly balanced step: each of P ranks computes 1/P of `batch_tokens`,
in sequences as long as the context, in full micro-batches. A larger number of nodes always comes last, because the user
may not have them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import Any

from engine.config.checks import check
from engine.config.mesh_checks import unit_nodes
from engine.config.schema import Config
from engine.cost.times import pairs
from engine.fit.estimate import Estimate, estimate, estimate_at
from engine.fit.largest import largest_capacity, least_nodes, least_ranks, named_ratio, of_ranks
from engine.fit.problem import fit_problem
from engine.job import Job
from engine.units import NS, PPM

_SHOWN = 3  # most suggestions
_ROUND = 1024  # tokens: suggested capacities are multiples of this, which are easier to read
_CHOICES: dict[str, tuple[Any, ...]] = {
    "recompute": ("layer_keep_attention", "layer"),
    "zero.stage": (2, 3),
    "offload.ratio": ("auto",),
    "optimizer.on_host": (True, False),
    "zero.weights_on_host": (True, False),
    "mlp_tile": (4096,),
}
TABLE = {"zero.stage": (1, 2, 3), "offload.ratio": (0.0, 1.0), "recompute": ("none", "layer_keep_attention", "layer")}


@dataclass(frozen=True)
class Suggestion:
    """New values of config keys, the memory estimate with them, and the modelled seconds of a step."""

    changes: dict[str, Any]
    estimate: Estimate
    step_s: float

    def __str__(self) -> str:
        return as_overrides(self.changes)

    def as_json(self) -> dict[str, Any]:
        """The object that `estimate-memory --json` prints in `ways`."""
        return {"set": str(self), "peak": self.estimate.peak, "host": self.estimate.host, "step_s": self.step_s}


def as_overrides(changes: Mapping[str, Any]) -> str:
    """New values of config keys, as on the command line: `zero.stage=2 offload.ratio=auto`."""
    values = {key: str(value).lower() if isinstance(value, bool) else value for key, value in changes.items()}
    return " ".join(f"{key}={value}" for key, value in values.items())


def suggestions(job: Job, fixed: Collection[str] = ()) -> list[Suggestion]:
    """Up to three suggestions, the cheapest first, that change no `fixed` key.

    A suggestion whose changes include all those of another is left out.
    """
    config, settings = job.config, job.settings
    found = list(_combinations(job, fixed))
    keys = [set(one.changes.items()) for one in found]
    least = [one for one, own in zip(found, keys, strict=True) if not any(other < own for other in keys)]
    least.sort(key=lambda one: one.step_s)
    if "cluster.nodes" in fixed or config.cluster.hostfile:
        return least[:_SHOWN]
    nodes, ranks = least_nodes(job), least_ranks(job)
    more: list[dict[str, Any]] = [{"cluster.nodes": nodes}] if nodes else []
    if config.context > settings.ranks * settings.least_capacity:
        needed, unit = -(-config.context // config.capacity), unit_nodes(config)
        devices = needed * config.parallel.tp * config.parallel.pp
        more.append({"cluster.nodes": unit * -(-devices // (unit * config.cluster.ranks_per_node))})
    if ranks and ranks > settings.ranks:  # for contexts that also need a larger capacity
        more.append(of_ranks(job, ranks))
    for changes in more:
        changed = _changed(job, changes)
        if changed is not None and fit_problem(changed) is None:
            least.append(_suggestion(changes, changed))
            break  # one suggestion of more nodes is enough
    return least[:_SHOWN]


def table(job: Job) -> list[dict[str, Any]]:
    """Estimates of a full micro-batch, as JSON, for each valid mix of ZeRO stage, offload ratio and recompute mode."""
    rows = []
    for values in product(*TABLE.values()):
        changes: dict[str, Any] = dict(zip(TABLE, values, strict=True))
        if (changed := _changed(job, changes)) is not None:
            found = estimate_at(changed, round(PPM * changes["offload.ratio"]))
            rows.append(changes | found.as_json())
    return rows


def _combinations(job: Job, fixed: Collection[str]) -> Iterator[Suggestion]:
    """Yield each combination of `_CHOICES` that fits and changes no `fixed` key.

    It may change the capacity: to a larger one if the context needs it, or a smaller one if the config's does not fit.
    """
    config = job.config
    needed = -(-config.context // job.settings.ranks)
    larger = {"capacity": needed} if needed > config.capacity else {}
    others = {key: [value for value in values if value != attrgetter(key)(config)] for key, values in _CHOICES.items()}
    for values in product(*((None, *(others[key] if key not in fixed else ())) for key in others)):
        changes = {key: value for key, value in zip(others, values, strict=True) if value is not None} | larger
        if (changed := _changed(job, changes)) is None:
            continue
        if not estimate(changed).fits:
            capacity = largest_capacity(changed.settings, named_ratio(changed.config))
            capacity -= capacity % _ROUND if capacity > _ROUND else 0
            changes |= {"capacity": capacity}
            changed = _changed(job, changes) if 0 < capacity < config.capacity else None
        if changes and changed is not None and fit_problem(changed) is None:
            yield _suggestion(changes, changed)


def _changed(job: Job, changes: dict[str, Any]) -> Job | None:
    """The job with other values; None if the values break a rule of the config."""
    config = with_values(job.config, changes)
    return None if check(config) else job.with_config(config)


def with_values(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values, by key: {"zero.stage": 2}. Rules between keys are not checked."""
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        part = getattr(config, section).model_copy(update={name: value}) if section else value
        config = config.model_copy(update={section or name: part})
    return config


def _suggestion(changes: dict[str, Any], job: Job) -> Suggestion:
    """The suggestion `changes`, where `job` already has the new values."""
    config, costs, found = job.config, job.costs, estimate(job)
    rates, load, tokens = costs.rates, found.load, config.batch_tokens / job.settings.ranks
    keys = pairs(rates, float(config.context)) / config.context
    forward, backward = rates.token_f + rates.pair_f * keys, rates.token_b + rates.pair_b * keys
    backward += rates.recompute_factor * rates.pair_f * keys
    copies = rates.copy * load.offload / PPM
    micro_batches = max(1.0, tokens / max(1, load.tokens))
    passes = zip((forward, backward), costs.gathers, strict=True)
    passes_ns = sum(max(tokens * max(each, copies), micro_batches * gather) for each, gather in passes)
    step_ns = passes_ns + (rates.micro + costs.slot) * micro_batches + costs.step
    return Suggestion(changes, found, step_ns / NS)
