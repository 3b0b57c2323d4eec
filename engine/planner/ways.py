"""Ways to make a config fit that does not: changes of keys, each tried with the estimate itself, the cheapest first.

What they cost is the modelled time of a step without imbalance: every rank computes its share of `batch_tokens`, in
sequences of the context, in full micro-batches. More nodes come last whatever they cost: they have to be there first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

from engine.config.checks import check
from engine.config.schema import Config
from engine.cost.model import NS, PPM
from engine.errors import ConfigError, MemoryFitError
from engine.planner.estimate import Estimate, at_ratio, estimate
from engine.planner.fit import largest_capacity, least_nodes, least_ranks, named, of_ranks
from engine.planner.settings import PlanSettings

_SHOWN = 3
_ROUND = 1024  # tokens: a capacity that people like to read
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
class Way:
    """Values of keys that make it fit, and what comes of them."""

    changes: dict[str, Any]
    estimate: Estimate
    step_s: float

    def __str__(self) -> str:
        return " ".join(f"{key}={_text(value)}" for key, value in self.changes.items())

    def as_json(self) -> dict[str, Any]:
        """Return it as `estimate-memory --json` has it."""
        return {"set": str(self), "peak": self.estimate.peak, "host": self.estimate.host, "step_s": self.step_s}


def ways(config: Config, settings: PlanSettings, fixed: Collection[str] = ()) -> list[Way]:
    """Return up to three ways, the cheapest first, without changes of keys that are `fixed`.

    None needs more changes than another one that it contains.
    """
    found = list(_tried(config, settings.ranks, fixed))
    keys = [set(way.changes.items()) for way in found]
    least = [way for way, own in zip(found, keys, strict=True) if not any(other < own for other in keys)]
    nodes = [] if "cluster.nodes" in fixed else _nodes(config, settings)
    return (sorted(least, key=lambda way: way.step_s) + nodes)[:_SHOWN]


@contextmanager
def ways_out(config: Config, fixed: Collection[str] = ()) -> Iterator[None]:
    """Let a refusal of what does not fit name the ways out, without changes of keys that are `fixed`."""
    try:
        yield
    except MemoryFitError as error:
        found = ways(config, PlanSettings.of(config, refuses=False), fixed)
        if not found:
            raise
        (problem,) = error.problems
        hint = "; or ".join(map(str, found))
        raise MemoryFitError(problem.message, key=problem.key, hint=hint) from None


def table(config: Config) -> list[dict[str, Any]]:
    """Return the estimates of a full capacity under each stage, offload ratio and recompute mode that go together."""
    return [
        dict(zip(TABLE, values, strict=True)) | found.as_json()
        for values in product(*TABLE.values())
        if (found := _with_ratio(config, dict(zip(TABLE, values, strict=True)))) is not None
    ]


def _with_ratio(config: Config, changes: dict[str, Any]) -> Estimate | None:
    """Return the estimate of the capacity at just the changes' offload ratio; None if they do not go together."""
    changed = _changed(config, changes, refuses=False)  # whatever the host has for it: `fits` tells
    return None if changed is None else at_ratio(*changed, round(PPM * changes["offload.ratio"]))


def _tried(config: Config, ranks: int, fixed: Collection[str]) -> Iterator[Way]:
    """Yield each combination of choices that fits, with a smaller capacity where only that lets it, and a larger one
    where the context needs it."""
    least = -(-config.context // ranks)
    larger = {"capacity": least} if least > config.capacity else {}
    others = {key: [value for value in values if value != _value(config, key)] for key, values in _CHOICES.items()}
    for values in product(*((None, *(others[key] if key not in fixed else ())) for key in others)):
        changes = {key: value for key, value in zip(others, values, strict=True) if value is not None} | larger
        if (changed := _changed(config, changes)) is None:
            continue
        found = estimate(*changed)
        if not found.fits:
            capacity = largest_capacity(changed[1], named(changed[0]))
            capacity -= capacity % _ROUND if capacity > _ROUND else 0
            changes |= {"capacity": capacity}
            changed = _changed(config, changes) if 0 < capacity < config.capacity else None
            if changed is None or not (found := estimate(*changed)).fits:
                continue
        if changes:
            yield Way(changes, found, _step_seconds(*changed, found))


def _nodes(config: Config, settings: PlanSettings) -> list[Way]:
    if config.cluster.hostfile:
        return []
    nodes, ranks = least_nodes(config, settings), least_ranks(config, settings)
    longer = of_ranks(config, settings, ranks) if ranks else {}  # where the context needs more of both
    for changes in ({"cluster.nodes": nodes} if nodes else {}, longer):
        changed = _changed(config, changes) if changes else None
        if changed is not None and (found := estimate(*changed)).fits:
            return [Way(changes, found, _step_seconds(*changed, found))]
    return []


def _changed(config: Config, changes: dict[str, Any], refuses: bool = True) -> tuple[Config, PlanSettings] | None:
    """Return the config with other values, and its settings (with `refuses` of PlanSettings.of); None if they do not
    go together."""
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        part = getattr(config, section).model_copy(update={name: value}) if section else value
        config = config.model_copy(update={section or name: part})
    if check(config):
        return None
    try:
        return config, PlanSettings.of(config, refuses)
    except (ConfigError, MemoryFitError):
        return None


def _value(config: Config, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def _step_seconds(config: Config, settings: PlanSettings, found: Estimate) -> float:
    costs, load = settings.costs, found.load
    rates, tokens = costs.rates, config.batch_tokens / settings.ranks
    pairs = (config.context + 1) / 2
    forward, backward = rates.token_f + rates.pair_f * pairs, rates.token_b + rates.pair_b * pairs
    backward += rates.again * rates.pair_f * pairs
    copies = rates.copy * load.offload / PPM
    passes = max(forward, copies) + max(backward, copies)
    return (passes * tokens + (rates.micro + costs.slot) * max(1.0, tokens / max(1, load.tokens)) + costs.step) / NS


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
