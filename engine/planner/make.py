"""Plan a step: run the chosen planner, convert its plan to the mode of the run, and verify it."""

from __future__ import annotations

import numpy as np

from engine.config.units import format_count
from engine.errors import ConfigError, DataError, PlanError
from engine.planner import ratios
from engine.planner.checks import check_longest, check_memory, check_nodes, check_planner
from engine.planner.plan.modes import lockstep, pipelined, rings_first
from engine.planner.plan.step_plan import StepPlan
from engine.planner.planners import PLANNERS
from engine.planner.proof.verify import verify
from engine.planner.settings import PlanSettings
from engine.planner.time.makespan import reduction_end
from engine.units import Ints

MOST_SEQUENCES = 2**21  # most sequences of a step: planning more would take minutes


def plan_step(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan and verify one step for sequences of `lengths` [S], in tokens. All plans are made here.

    A pure function: the same input gives the same bytes on every rank. Raises DataError for invalid lengths,
    MemoryFitError for a sequence, a micro-batch or a node that does not fit, ConfigError for other settings that cannot
    be planned, and PlanError for a bug in the planner.
    """
    check_planner(settings)
    check_nodes(settings)
    # Compiled code does not check its inputs, so invalid lengths are rejected here.
    given = np.asarray(lengths)
    if given.size == 0:
        raise DataError("cannot plan a step without sequences")
    if given.ndim != 1 or given.dtype.kind not in "iu":
        raise DataError(f"lengths must be a 1-D array of integers, not {given.ndim}-D of {given.dtype}")
    if len(given) > MOST_SEQUENCES:
        message = f"a step of {len(given):,} sequences is too large to plan: at most {MOST_SEQUENCES:,}"
        raise ConfigError(message, key="batch_tokens", hint="set a smaller batch_tokens, or use longer sequences")
    if given.min() < 1:
        at = int(np.argmax(given < 1))
        raise DataError(f"sequence {at} has {given[at]} tokens; every sequence of a step has at least one")
    longest = int(given.max())
    if longest > settings.context:
        most = format_count(settings.context)
        message = f"a sequence of {format_count(longest)} tokens is longer than context={most}"
        raise ConfigError(message, key="context", hint="split documents at the context")
    check_longest(longest, settings)

    lengths = given.astype(np.int64)  # a copy: a plan shares no memory with its caller
    check_memory(int(lengths.sum()), settings)
    plan = ratios.fitted(_planned(lengths, settings), settings)
    if settings.mode == "pipeline" and settings.offload and not ratios.fits_in_flight(plan, settings):
        # Micro-batches that exceed the capacity with offload do not fit together with the others in flight.
        plan = ratios.fitted(_planned(lengths, settings.without_offload()), settings)
    if not np.array_equal(plan.sequence_lengths, lengths):
        raise PlanError(0, "the plan's sequences differ from the given ones")
    verify(plan, settings)
    return plan


def _planned(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Run the chosen planner, and convert its plan to the mode of the run, or order it for reductions."""
    planner = PLANNERS[settings.planner]
    plan = planner.plan(lengths, settings)
    if settings.mode == "free":
        ordered = rings_first(plan)
        # A rank may have filled the wait for a ring with the micro-batch that now runs last.
        longer = ordered is not plan and reduction_end(ordered, settings) > reduction_end(plan, settings)
        return plan if longer else ordered
    if settings.mode in planner.modes:
        return plan
    slotted = lockstep(plan)
    return slotted if settings.mode == "lockstep" else pipelined(slotted, settings.stages)
