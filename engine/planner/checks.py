"""Checks of settings and lengths before a step is planned: each function raises an error that names the user's mistake.

`plan_step` calls them for one step. `engine/fit` checks a whole config before any step is planned, and suggests changes
with which it would fit. It imports the planner, so the checks that both need are here.
"""

from __future__ import annotations

import numpy as np

from engine.config.mesh_checks import MOST_RANKS
from engine.config.units import counted, format_apart, format_count
from engine.cost.budget import fits, least
from engine.errors import ConfigError, MemoryFitError
from engine.planner.planners import PLANNERS
from engine.planner.settings import PlanSettings

SHOW_FIT = "`bytescale estimate-memory --fit` shows what fits"
NODE_HOLDS_NOTHING = "leave the node out, or use more ranks or a higher zero.stage"


def check_planner(settings: PlanSettings) -> None:
    """Raise ConfigError for more ranks than can be planned, or for a `max_peers` below what the planner needs."""
    if settings.ranks > MOST_RANKS:  # without a hostfile, the rules of the config have already rejected this
        message = f"{settings.ranks:,} HDP ranks exceed the maximum of {MOST_RANKS:,}"
        hint = "use fewer nodes, or more devices per rank: parallel.tp, parallel.pp"
        raise ConfigError(message, key="cluster.hostfile", hint=hint)
    needed = min(PLANNERS[settings.planner].most_peers, settings.ranks - 1)
    if settings.max_peers < needed:
        message = (
            f"the {settings.planner} planner needs up to {counted(needed, 'peer')} per rank, "
            f"but max_peers is {settings.max_peers}"
        )
        raise ConfigError(message, key="planner.max_peers", hint=f"set it to at least {needed}")


def check_nodes(settings: PlanSettings) -> None:
    """Raise MemoryFitError for a node whose ranks have no memory for a single token."""
    if settings.least_capacity < 1:
        host = settings.host(int(np.argmin(settings.cluster.memory)))
        message = f"a rank of node {host} has no memory left for even one token after the model states"
        raise MemoryFitError(message, key="cluster.hostfile", hint=NODE_HOLDS_NOTHING)


def check_longest(tokens: int, settings: PlanSettings) -> None:
    """Raise MemoryFitError for a sequence of `tokens` that does not fit on a ring of all ranks."""
    holds = settings.ranks * settings.least_capacity
    if tokens <= holds:
        return
    each = f"{counted(settings.ranks, 'rank')} x capacity {format_count(settings.least_capacity)}"
    message = f"a sequence of {format_count(tokens)} tokens does not fit: {each} = {format_count(holds)}"
    hint = f"set context={format_count(holds)}, or use more ranks; {SHOW_FIT}"
    if settings.least_capacity < settings.capacity:
        host = settings.host(int(np.argmin(settings.capacities)))
        message += f", because the memory of node {host} is too small for capacity={settings.capacity}"
        hint = f"set context={holds}, use more ranks, or leave the node out"
    raise MemoryFitError(message, key="context", hint=hint)


def check_memory(step_tokens: int, settings: PlanSettings) -> None:
    """Raise MemoryFitError if model states and a full micro-batch do not fit, whatever the offload ratio.

    A full micro-batch has as many tokens as the capacity, or as the step if that has fewer, all in rings.
    """
    costs, device = settings.costs, settings.device_memory
    if settings.host_memory < 0:
        states = costs.host_fixed_bytes
        needs, given = format_apart(states, states + settings.host_memory)
        message = f"the model states on the host need {needs} per rank, but a rank has only {given} of host memory"
        hint = "use more ranks, or set zero.weights_on_host or optimizer.on_host to false"
        hint += "; with data.runtime=ray, also Ray's data.ray.memory is counted"
        raise MemoryFitError(message, key="cluster.host_memory", hint=hint)
    tokens = min(settings.capacity, step_tokens)
    if settings.full_fits and tokens <= settings.largest_capacity:
        return
    if fits(costs, tokens, settings.budget(device)):
        return
    number = np.array([tokens], dtype=object)  # Python integers: the bytes of a huge model exceed 64 bits
    peak, place, has = int(costs.peak_bytes(number, number, settings.offload)[0]), "device", device
    if peak <= device:  # this offload is enough for the device, so the host is too small
        needed = min(settings.offload, least(costs, tokens, tokens, device))
        peak, place, has = int(costs.host_bytes(number, needed)[0]), "host", settings.host_memory
    needs, leaves = format_apart(peak, has)
    of = f"a micro-batch of {format_count(tokens)} tokens"
    message = f"{of} needs {needs} of {place} memory, but a rank has only {leaves} available"
    raise MemoryFitError(message, key="capacity", hint=SHOW_FIT)
