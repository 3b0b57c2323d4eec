"""What would fit: the largest capacity, the longest context, the least ranks and nodes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from engine.config.checks import MOST_RANKS, unit_nodes
from engine.config.schema import Config
from engine.cost.allowance import Allowance
from engine.cost.model import PPM
from engine.cost.room import fits, largest, most_tokens
from engine.planner.settings import PlanSettings

_MOST_TOKENS = 2**32  # of a capacity and a context, as the schema has it
_MOST_NODES = 65536  # too


def named(config: Config) -> int:
    """Return the offload ratio, ppm, that the config names, 0 for `auto`."""
    return 0 if config.offload.ratio == "auto" else round(PPM * config.offload.ratio)


def largest_capacity(settings: PlanSettings, ratio: int = 0) -> int:
    """Return the most tokens that a rank of the usual memory holds, offloading as much as allowed; 0 if none.

    Where a `ratio` is named the host has to hold that much of them, needed or not (settings.py). Ranks of less memory
    hold as many of them as they can.
    """
    return min(_MOST_TOKENS, most_tokens(settings.costs, settings.room(settings.device_memory)._replace(named=ratio)))


def longest_context(settings: PlanSettings, ratio: int = 0) -> int:
    """Return the tokens that a ring of all ranks holds at the largest capacity: as many on each as on the smallest."""
    full = replace(settings, capacity=largest_capacity(settings, ratio))
    return min(_MOST_TOKENS, full.ranks * full.least_capacity)


def least_ranks(config: Config, settings: PlanSettings) -> int | None:
    """Return the least HDP ranks whose ring holds the context at their largest capacity; None if no number does.

    Up to a node's they are any number; beyond it, those of whole nodes.
    """
    counts = _rank_counts(config)

    def enough(index: int) -> bool:
        return longest_context(among(config, settings, counts(index)), named(config)) >= config.context

    planned = min(MOST_RANKS, _MOST_NODES * config.cluster.ranks_per_node // (config.parallel.tp * config.parallel.pp))
    most = bisect_right(range(planned + 1), planned, key=counts) - 1
    short = largest(lambda index: not enough(index), most)
    return counts(short + 1) if short < most else None


def of_ranks(config: Config, settings: PlanSettings, ranks: int) -> dict[str, int]:
    """Return the keys that make a cluster of just so many ranks (of `least_ranks`), with their largest capacity."""
    node, devices = config.cluster.ranks_per_node, ranks * config.parallel.tp * config.parallel.pp
    whole = {"cluster.nodes": -(-devices // node)} | ({"cluster.ranks_per_node": devices} if devices < node else {})
    return whole | {"capacity": largest_capacity(among(config, settings, ranks), named(config))}


def least_nodes(config: Config, settings: PlanSettings) -> int | None:
    """Return the least nodes on which the capacity fits, more than there are; None if no number does."""
    group = config.parallel.tp * config.parallel.pp
    unit = unit_nodes(config)
    ranks = unit * config.cluster.ranks_per_node // group

    def enough(index: int) -> bool:
        more = among(config, settings, index * ranks)
        return fits(more.costs, config.capacity, more.room(more.device_memory))

    most = _MOST_NODES // unit
    short = largest(lambda index: not enough(index), most)
    return unit * (short + 1) if short < most else None


def among(config: Config, settings: PlanSettings, ranks: int) -> PlanSettings:
    """Return the settings as one of so many ranks of the least memory has them: good for bytes, not for planning."""
    devices = ranks * config.parallel.tp * config.parallel.pp
    costs = settings.costs.among(config, ranks)
    usable = Allowance.of(config, devices).usable(config.cluster.device_memory)
    nodes = (replace(settings.cluster.nodes[0], slots=ranks, memory=None),)
    cluster = replace(settings.cluster, nodes=nodes, device_memory=usable)
    host = config.cluster.host_memory - costs.host_fixed_bytes
    return replace(settings, cluster=cluster, costs=costs, host_memory=host)


def _rank_counts(config: Config) -> Callable[[int], int]:
    """Return the numbers of HDP ranks that a cluster of these nodes may have, from the first (1) on, ascending."""
    node, group = config.cluster.ranks_per_node, config.parallel.tp * config.parallel.pp
    inside, unit = node // group, math.lcm(node, group) // group  # none inside a node where a rank is of several
    return lambda index: index if index <= inside else unit * (inside // unit + index - inside)
