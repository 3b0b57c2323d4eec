"""Finds the order of passes of a pipeline whose micro-batches take unequal times.

1F1B suits micro-batches of equal time. Otherwise every stage waits for the longest one, stages - 1 times. Here each
stage runs what is ready, as far as its memory allows, so that passes of short micro-batches fill the time in which a
long one is on the other stages. The slots of a plan are the jobs: all ranks run the passes of a slot together.

A schedule is made in order of time. The stage that can start a pass the earliest starts one: a backward pass, if one is
ready, since it frees memory, else the forward pass of the slot that comes first in a list of priorities. This list is
improved by moving one slot at a time to the place where the step ends the earliest.

Letters: J slots, n stages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import njit
from engine.units import Bools, Floats, Ints

_SWEEPS = 4  # over all slots, at most
_TRIALS = 2**22  # the search ends after so many schedules, times n J^2, which is about their cost: .1 s in all


class Jobs(NamedTuple):
    """The slots of a plan."""

    forward: Floats  # [n, J] ns
    backward: Floats  # [n, J]
    tokens: Ints  # [n, J] that the fullest rank holds from the forward to the backward pass
    linked: Bools  # [J] whether the slot continues a sequence of the slot before it, so that their order is fixed


class Order(NamedTuple):
    """The passes of all stages in the order in which they end, as `StepPlan.passes`, and the end of the last one."""

    passes: Ints  # [2 n J]
    makespan: float  # ns; infinite if the jobs do not fit the memory


def interleave(jobs: Jobs, most: Ints, sweeps: int = _SWEEPS) -> Order:
    """Find an order of the passes in which no stage holds more than `most` [n] tokens at once.

    With `sweeps` 0 only a few simple orders are tried.
    """
    return Order(*_search(jobs, most, sweeps))


@njit
def _search(jobs: Jobs, most: Ints, sweeps: int) -> tuple[Ints, float]:
    """Compiled part of `interleave`."""
    chain = np.cumsum(~jobs.linked) - 1  # by slot: slots of one chain move together
    chains = chain[-1] + 1
    work = np.zeros(chains)
    for job in range(len(chain)):
        work[chain[job]] += jobs.forward[:, job].sum() + jobs.backward[:, job].sum()
    longest_first = np.argsort(-work, kind="mergesort")
    best, order = np.inf, longest_first
    for start in (longest_first, longest_first[::-1].copy(), np.concatenate((longest_first[-1:], longest_first[:-1]))):
        end = _schedule(jobs, most, _ranks(start)[chain], np.empty(0, np.int64))
        if end < best:
            best, order = end, start
    left = _TRIALS // (len(most) * len(chain) ** 2)
    for _ in range(sweeps):
        before = best
        for moved in longest_first:
            others = order[order != moved]
            for place in range(chains):
                left -= 1
                if left < 0:
                    break
                trial = np.concatenate((others[:place], np.array([moved]), others[place:]))
                end = _schedule(jobs, most, _ranks(trial)[chain], np.empty(0, np.int64))
                if end < best:
                    best, order = end, trial
        if left < 0 or best > before * 0.999:
            break
    passes = np.zeros(2 * len(most) * len(chain), np.int64)
    if best < np.inf:
        _schedule(jobs, most, _ranks(order)[chain], passes)
    return passes, best


@njit
def _ranks(order: Ints) -> Ints:
    """Return the position of each chain in `order`."""
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return position


@njit
def _schedule(jobs: Jobs, most: Ints, priority: Ints, passes: Ints) -> float:
    """Return the end of the schedule with these priorities [J]; infinite if it does not fit.

    Writes the passes in the order of their ends to `passes` [2 n J], unless it is empty.
    """
    stages, count = jobs.forward.shape
    forward, backward = np.full((stages, count), -1.0), np.full((stages, count), -1.0)  # ends of passes
    free, live = np.zeros(stages), np.zeros(stages, np.int64)
    begin, chosen, back = np.full(stages, np.inf), np.full(stages, -1), np.zeros(stages, np.bool_)
    ends, number = np.empty(len(passes)), 0
    stale = np.ones(stages, np.bool_)
    for _ in range(2 * stages * count):
        for stage in range(stages):
            if stale[stage]:
                begin[stage], chosen[stage], back[stage] = _next(
                    jobs, most, priority, stage, forward, backward, free[stage], live[stage]
                )
                stale[stage] = False
        stage = int(np.argmin(begin))
        job = chosen[stage]
        if begin[stage] == np.inf:
            return np.inf
        if back[stage]:
            free[stage] = backward[stage, job] = begin[stage] + jobs.backward[stage, job]
            live[stage] -= jobs.tokens[stage, job]
        else:
            free[stage] = forward[stage, job] = begin[stage] + jobs.forward[stage, job]
            live[stage] += jobs.tokens[stage, job]
        if len(passes) > 0:
            passes[number], ends[number] = 2 * (job * stages + stage) + int(back[stage]), free[stage]
            number += 1
        for near in range(max(0, stage - 1), min(stages, stage + 2)):
            stale[near] = True
    if len(passes) > 0:
        passes[:] = passes[np.argsort(ends, kind="mergesort")]
    return float(free.max())


@njit
def _next(
    jobs: Jobs, most: Ints, priority: Ints, stage: int, forward: Floats, backward: Floats, free: float, live: int
) -> tuple[float, int, bool]:
    """Return the earliest start of the next pass of a stage, its slot, and whether it is a backward pass."""
    last = len(most) - 1
    begin, chosen, back, first = np.inf, -1, False, np.inf
    for job in range(len(priority)):
        if backward[stage, job] >= 0.0:
            continue
        ready, rank = free, float(priority[job])
        is_back = forward[stage, job] >= 0.0
        if is_back:
            arrives = forward[stage, job] if stage == last else backward[stage + 1, job]
            # The slot after it, if it continues its sequences, must have run backward.
            if arrives < 0.0 or (job + 1 < len(priority) and jobs.linked[job + 1] and backward[stage, job + 1] < 0.0):
                continue
            ready, rank = max(ready, arrives), rank - len(priority)
        else:
            arrives = 0.0 if stage == 0 else forward[stage - 1, job]
            if arrives < 0.0 or live + jobs.tokens[stage, job] > most[stage]:
                continue
            if jobs.linked[job] and forward[stage, job - 1] < 0.0:
                continue
            ready = max(ready, arrives)
        if ready < begin or (ready == begin and rank < first):
            begin, chosen, back, first = ready, job, is_back, rank
    return begin, chosen, back
