"""The largest capacity, the longest context, and the fewest ranks and nodes that fit."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace

from engine.config.mesh_checks import MOST_RANKS, unit_nodes
from engine.config.schema import Config
from engine.cost.allowance import Allowance
from engine.cost.budget import fits, largest, most_tokens
from engine.job import Job
from engine.planner.settings import PlanSettings
from engine.units import PPM

_MOST_TOKENS = 2**32  # largest capacity and context, as in the schema
_MOST_NODES = 65536  # as in the schema


def named_ratio(config: Config) -> int:
    """The offload ratio of the config, in ppm; 0 for `auto`."""
    return 0 if config.offload.ratio == "auto" else round(PPM * config.offload.ratio)


def largest_capacity(settings: PlanSettings, ratio: int = 0) -> int:
    """Most tokens that fit in a micro-batch on a rank of the usual memory, with as much offload as allowed; 0 if none.

    The host must have memory for the offload ratio `ratio` (ppm) even if a smaller one is enough (`fit_problem`). Ranks
    with less memory get a smaller capacity (`PlanSettings.capacities`).
    """
    budget = settings.budget(settings.device_memory)._replace(named=ratio)
    return min(_MOST_TOKENS, most_tokens(settings.costs, budget))


def longest_context(settings: PlanSettings, ratio: int = 0) -> int:
    """Tokens of the longest sequence that fits on a ring of all ranks, at the largest capacity.

    All ranks use the smallest capacity. `ratio`: see `largest_capacity`.
    """
    full = replace(settings, capacity=largest_capacity(settings, ratio))
    return min(_MOST_TOKENS, full.ranks * full.least_capacity)


def least_ranks(job: Job) -> int | None:
    """Fewest HDP ranks on whose ring the context fits, at their largest capacity; None if no number is enough.

    Up to one node, any number of ranks is possible; beyond it, only whole nodes.
    """
    config = job.config
    node, group = config.cluster.ranks_per_node, config.parallel.tp * config.parallel.pp
    inside, unit = node // group, math.lcm(node, group) // group  # inside is 0 if a rank spans several nodes

    def counts(index: int) -> int:
        """The possible numbers of ranks in ascending order, by index; index 0 is 0 ranks."""
        return index if index <= inside else unit * (inside // unit + index - inside)

    def enough(index: int) -> bool:
        return longest_context(among(job, counts(index)), named_ratio(config)) >= config.context

    planned = min(MOST_RANKS, _MOST_NODES * node // group)
    most = bisect_right(range(planned + 1), planned, key=counts) - 1
    short = largest(lambda index: not enough(index), most)
    return counts(short + 1) if short < most else None


def of_ranks(job: Job, ranks: int) -> dict[str, int]:
    """Config keys and values for a cluster of `ranks` HDP ranks (from `least_ranks`) with their largest capacity."""
    config = job.config
    node, devices = config.cluster.ranks_per_node, ranks * config.parallel.tp * config.parallel.pp
    whole = {"cluster.nodes": -(-devices // node)} | ({"cluster.ranks_per_node": devices} if devices < node else {})
    return whole | {"capacity": largest_capacity(among(job, ranks), named_ratio(config))}


def least_nodes(job: Job) -> int | None:
    """Fewest nodes on which the capacity of the config fits; None if no number is enough."""
    config = job.config
    group = config.parallel.tp * config.parallel.pp
    unit = unit_nodes(config)
    ranks = unit * config.cluster.ranks_per_node // group

    def enough(index: int) -> bool:
        more = among(job, index * ranks)
        return fits(more.costs, config.capacity, more.budget(more.device_memory))

    most = _MOST_NODES // unit
    short = largest(lambda index: not enough(index), most)
    return unit * (short + 1) if short < most else None


def among(job: Job, ranks: int) -> PlanSettings:
    """The settings for a cluster of `ranks` ranks of the usual memory: for memory estimates only, not for planning."""
    config, settings = job.config, job.settings
    devices = ranks * config.parallel.tp * config.parallel.pp
    costs = settings.costs.among(config, ranks)
    allowance, host = Allowance.of(config, job.cluster, devices), config.cluster.host_memory
    usable = allowance.usable(config.cluster.device_memory)
    nodes = (replace(settings.cluster.nodes[0], devices=ranks, memory=None),)
    cluster = replace(settings.cluster, nodes=nodes, device_memory=usable)
    host_memory = host - allowance.free(host) - costs.host_fixed_bytes
    return replace(settings, cluster=cluster, costs=costs, host_memory=host_memory)
