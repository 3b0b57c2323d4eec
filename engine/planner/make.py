"""The only way to a plan: a planner, slots if asked for, and the proof."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.config.units import counted, format_bytes, format_count
from engine.errors import ConfigError, DataError, MemoryFitError, PlanError
from engine.planner import memory
from engine.planner.adaptive import adaptive
from engine.planner.balanced import balanced
from engine.planner.lockstep import lockstep
from engine.planner.naive import naive
from engine.planner.plan import Ints, StepPlan
from engine.planner.settings import PlanSettings
from engine.planner.staged import staged
from engine.planner.static import static
from engine.planner.verify import verify

__all__ = ["PLANNERS", "PlanSettings", "plan_step"]

MOST_SEQUENCES = 2**21  # of a step: more take minutes
PLANNERS: dict[str, Callable[[Ints, PlanSettings], StepPlan]] = {
    "static": static,
    "naive": naive,
    "balanced": balanced,
    "adaptive": adaptive,
}


def plan_step(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Return the verified plan of one step for sequences of `lengths` [S], in tokens.

    A pure function: the same input gives the same bytes on every rank. Raises DataError for lengths that are none,
    ConfigError for a sequence that the ranks cannot hold together, MemoryFitError where a full micro-batch does not fit
    the device, and PlanError for a planner's mistake.
    """
    _check_nodes(settings)
    given = np.asarray(lengths)
    _check_lengths(given, settings)
    lengths = given.astype(np.int64)  # a copy: a plan shares no memory with its caller
    _check_memory(int(lengths.sum()), settings)
    plan = memory.fitted(_in_mode(PLANNERS[settings.planner](lengths, settings), settings), settings)
    if not np.array_equal(plan.lengths, lengths):
        raise PlanError(0, "the plan is not of the sequences that were asked for")
    verify(plan, settings)
    return plan


def _in_mode(plan: StepPlan, settings: PlanSettings) -> StepPlan:
    """Return the plan in the mode that is asked for: static and naive know free mode only."""
    if plan.mode == settings.mode:
        return plan
    plan = lockstep(plan)
    return plan if settings.mode == "lockstep" else staged(plan, settings.stages)


def _check_lengths(lengths: Ints, settings: PlanSettings) -> None:
    if lengths.size == 0:
        raise DataError("a step without any sequence cannot be planned")
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise DataError(f"lengths are a row of whole numbers, not {lengths.ndim} dimensions of {lengths.dtype}")
    if len(lengths) > MOST_SEQUENCES:
        message = f"{len(lengths):,} sequences in a step are more than the {MOST_SEQUENCES:,} that can be planned"
        raise ConfigError(message, key="batch_tokens", hint="a smaller batch_tokens, or longer sequences")
    if lengths.min() < 1:
        at = int(np.argmax(lengths < 1))
        raise DataError(f"sequence {at} has {lengths[at]} tokens; every sequence of a step has at least one")
    longest, holds = int(lengths.max()), settings.ranks * settings.least_capacity
    if longest > settings.context:
        message = f"a sequence of {format_count(longest)} tokens is longer than {format_count(settings.context)}"
        raise ConfigError(message, key="context", hint="cut documents to the context")
    if longest > holds:
        message = (
            f"a sequence of {format_count(longest)} tokens does not fit: {counted(settings.ranks, 'rank')} x capacity "
            f"{format_count(settings.least_capacity)} hold {format_count(holds)}"
        )
        raise ConfigError(message, key="context", hint=f"context={holds}, or a larger capacity, or more ranks")


def _check_nodes(settings: PlanSettings) -> None:
    """Refuse a node whose ranks hold nothing."""
    least = int(np.argmin(settings.capacities))
    if settings.capacities[least] < 1:
        host = settings.cluster.nodes[int(settings.cluster.node_of[least])].host
        message = f"a rank of node {host} holds not one token beside the model states"
        raise MemoryFitError(message, key="cluster.hostfile", hint="leave the node out, or take more ranks")


def _check_memory(step_tokens: int, settings: PlanSettings) -> None:
    """Refuse a capacity whose full micro-batch, all in rings, does not fit, with no more offloaded than this takes."""
    if settings.host_memory < 0:
        needs = format_bytes(settings.costs.host_fixed_bytes)
        hint = "more ranks, or take zero.weights_on_host or optimizer.on_host back"
        raise MemoryFitError(f"the model states on the host need {needs} a rank", key="cluster.host_memory", hint=hint)
    tokens, costs = min(settings.capacity, step_tokens), settings.costs
    most = costs.most_tokens(settings.device_memory)
    if tokens <= most or _fits_with_offload(tokens, settings):
        return
    number = np.array([tokens], dtype=object)  # Python's: those of a huge model pass 64 bits
    peak = int(costs.peak_bytes(number, number)[0])
    message = (
        f"{format_count(tokens)} tokens in a micro-batch need {format_bytes(peak)} a rank, "
        f"and the device leaves {format_bytes(settings.device_memory)}"
    )
    if settings.offload:
        message += "; what may be offloaded is not enough"
    hint = f"capacity={most} fits" if most else "the model states alone do not fit: more ranks or a smaller model"
    raise MemoryFitError(message, key="capacity", hint=hint)


def _fits_with_offload(tokens: int, settings: PlanSettings) -> bool:
    costs, number = settings.costs, np.int64(tokens)
    if not settings.offload or costs.token_bytes * tokens >= 2**62:
        return False
    ratio = memory.least_offload(tokens, settings.capacity, settings.device_memory, settings).offload
    peak, host = costs.peak_bytes(number, number, ratio), costs.host_bytes(number, ratio)
    return int(peak) <= settings.device_memory and int(host) <= settings.host_memory
