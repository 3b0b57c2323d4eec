"""The only way to a plan: a planner, slots if asked for, and the proof."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.config.units import format_apart, format_count
from engine.cost import room
from engine.cost.model import PPM, Costs
from engine.cost.room import Room
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
    the device or its host, or a node's memory is what is short, and PlanError for a planner's mistake.
    """
    settings.check_nodes()
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
    longest = int(lengths.max())
    if longest > settings.context:
        message = f"a sequence of {format_count(longest)} tokens is longer than {format_count(settings.context)}"
        raise ConfigError(message, key="context", hint="cut documents to the context")
    settings.check_longest(longest)


def _check_memory(step_tokens: int, settings: PlanSettings) -> None:
    """Refuse a capacity whose full micro-batch, all in rings, does not fit, with no more offloaded than this takes."""
    if settings.host_memory < 0:
        states = settings.costs.host_fixed_bytes
        needs, given = format_apart(states, states + settings.host_memory)
        message = f"the model states on the host need {needs} a rank, and cluster.host_memory is {given}"
        hint = "more ranks, or take zero.weights_on_host or optimizer.on_host back"
        raise MemoryFitError(message, key="cluster.host_memory", hint=hint)
    tokens, costs, has = min(settings.capacity, step_tokens), settings.costs, settings.room(settings.device_memory)
    if room.fits(costs, tokens, has):
        return
    raise MemoryFitError(_too_much(tokens, settings), key="capacity", hint=_less(costs, has))


def _less(costs: Costs, has: Room) -> str:
    """Return what fits instead, for a hint."""
    most, offloading = (room.most_tokens(costs, one) for one in (has, has._replace(offload=PPM)))
    if not has.memory:
        return "a device with more memory: its runtime alone takes as much as this one has"
    if not offloading:
        return "the model states alone do not fit: more ranks or a smaller model"
    fits = [f"capacity={most} fits"] if most else []
    return ", or ".join(fits + ([f"capacity={offloading} with offload.ratio=auto"] if offloading > most else []))


def _too_much(tokens: int, settings: PlanSettings) -> str:
    """Say whose room a full micro-batch lacks: the device's, or the host's for what would let it fit the device."""
    costs, device = settings.costs, settings.device_memory
    number = np.array([tokens], dtype=object)  # Python's: those of a huge model pass 64 bits
    of = f"{format_count(tokens)} tokens in a micro-batch"
    if settings.offload and int(costs.peak_bytes(number, number, settings.offload)[0]) <= device:
        away = int(costs.host_bytes(number, min(settings.offload, room.least(costs, tokens, tokens, device)))[0])
        puts, leaves = format_apart(away, settings.host_memory)
        return f"{of} put {puts} a rank on the host, which leaves {leaves}"
    peak, leaves = format_apart(int(costs.peak_bytes(number, number)[0]), device)
    end = "; what may be offloaded is not enough" if settings.offload else ""
    return f"{of} need {peak} a rank, and the device leaves {leaves} beside runtime and gaps{end}"
