"""The reason why a config does not fit in memory: its capacity, its offload ratio or its context."""

from __future__ import annotations

import numpy as np

from engine.config.units import format_apart, format_bytes, format_count
from engine.errors import MemoryFitError, Problem
from engine.fit.estimate import estimate
from engine.fit.largest import named_ratio
from engine.job import Job
from engine.planner.checks import NODE_HOLDS_NOTHING, check_longest


def fit_problem(job: Job) -> Problem | None:
    """The first reason why a job does not fit, with a hint; None if it fits.

    A job that fits can be planned whatever the lengths of its sequences, up to its context.
    """
    config, settings, found = job.config, job.settings, estimate(job)
    if not found.fits:
        places = {
            "device": (found.peak, found.device_total - found.headroom),
            "host": (found.host, found.host_total - found.host_headroom),
        }
        short = {place: format_apart(need, has) for place, (need, has) in places.items() if need > has}
        beside = f" after cluster.headroom={config.cluster.headroom:g}" if config.cluster.headroom else ""
        needs = ", and needs ".join(
            f"{need} of {place} memory, but has only {has}{beside}" for place, (need, has) in short.items()
        )
        message = f"a rank of node {found.node} needs {needs}" if found.node else f"a rank needs {needs}"
        if "device" in short and found.device_total != config.cluster.device_memory:  # the hostfile says so
            return Problem(message, "cluster.hostfile", NODE_HOLDS_NOTHING)
        hint = "use a smaller model, more devices, or devices with more memory"
        return Problem(message, f"cluster.{next(iter(short))}_memory", hint)

    # If the offload ratio is a number, the host must have memory for it; `auto` adapts to the host.
    ratio, host_memory = named_ratio(config), found.host_total - found.host_headroom
    away, states = int(settings.costs.host_bytes(np.int64(config.capacity), ratio)), settings.costs.host_fixed_bytes
    if ratio and states + away > host_memory:
        total, holds = format_apart(states + away, host_memory)
        both = (
            f"{format_bytes(away)} on the host in addition to {format_bytes(states)} of model states, {total} in total"
        )
        message = (
            f"offloading {config.offload.ratio:g} of a micro-batch of {format_count(config.capacity)} tokens puts "
            f"{both if states else f'{total} on the host'}, but the host has {holds} per rank"
            f"{f' after cluster.headroom={config.cluster.headroom:g}' if config.cluster.headroom else ''}"
        )
        hint = "set offload.ratio=auto, which uses what fits, or a larger cluster.host_memory"
        return Problem(message, "offload.ratio", hint)

    try:
        check_longest(config.context, settings)
    except MemoryFitError as error:
        return error.problems[0]
    return None
