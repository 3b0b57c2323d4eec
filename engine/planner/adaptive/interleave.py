"""Finds the order of passes of a pipeline whose micro-batches take unequal times.

1F1B suits micro-batches of equal time. Otherwise every stage waits for the longest one, stages - 1 times. Here each
stage runs ready passes as far as its memory allows, so that passes of short micro-batches fill the time in which a long
one is on the other stages. The slots of a plan are the jobs: all ranks run the passes of a slot together.

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
# The search ends after _TRIALS / (n J^2) schedules, some .02 s. Not after a time: plans must not depend on the machine.
_TRIALS = 2**22


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
    # Three simple orders to begin with: the longest chain first, the shortest first, and the longest first after the
    # shortest, which lets all stages begin early.
    longest_first = np.argsort(-work, kind="mergesort")
    best, order = np.inf, longest_first
    for start in (longest_first, longest_first[::-1].copy(), np.concatenate((longest_first[-1:], longest_first[:-1]))):
        end = _schedule(jobs, most, _ranks(start)[chain], np.empty(0, np.int64))
        if end < best:
            best, order = end, start
    left = _TRIALS // (len(most) * len(chain) ** 2)
    # In a sweep every chain is tried in every place, the chains with the most work first. A sweep that gains less than
    # 0.1 % is the last one.
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
    # Trials need only the end of a schedule. The passes of the best one are written by running it once more.
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
    """Return the end, in ns, of the schedule with these priorities [J]; infinite if it does not fit.

    Writes the passes in the order of their ends to `passes` [2 n J], unless it is empty. It is one function, because
    numba passes arrays to another one slowly: with a function that chooses the next pass it takes four times as long.
    """
    stages, count = jobs.forward.shape
    forward, backward = np.full((stages, count), -1.0), np.full((stages, count), -1.0)  # ends of passes
    free_at, live = np.zeros(stages), np.zeros(stages, np.int64)
    # `waiting[stage, : length[stage]]` are the slots whose next pass on the stage has its input, in any order. The
    # first stage needs none: `entering` has all slots by priority, and those before `head` have run forward there.
    waiting, length = np.empty((stages, count), np.int64), np.zeros(stages, np.int64)
    entering, head = np.argsort(priority, kind="mergesort"), 0
    begin, chosen = np.full(stages, np.inf), np.full(stages, -1)  # the next pass of each stage
    stale = np.ones(stages, np.bool_)  # whether it must be chosen again
    ends, number = np.empty(len(passes)), 0
    for _ in range(2 * stages * count):
        # Choose the pass that can start the earliest; of several the one with the highest priority. Two never have the
        # same, since of a chain at most one slot can run forward and one backward.
        for stage in range(stages):
            if not stale[stage]:
                continue
            earliest, best_rank, best = np.inf, np.inf, -1
            for place in range(length[stage]):
                job = waiting[stage, place]
                rank = float(priority[job])
                if forward[stage, job] >= 0.0:
                    # The slot after it, if it continues its sequences, must have run backward.
                    if job + 1 < count and jobs.linked[job + 1] and backward[stage, job + 1] < 0.0:
                        continue
                    arrives = forward[stage, job] if stage == stages - 1 else backward[stage + 1, job]
                    rank -= count  # before all forward passes: it frees memory
                else:
                    if live[stage] + jobs.tokens[stage, job] > most[stage]:
                        continue
                    if jobs.linked[job] and forward[stage, job - 1] < 0.0:
                        continue
                    arrives = forward[stage - 1, job]
                ready = max(free_at[stage], arrives)
                if ready < earliest or (ready == earliest and rank < best_rank):
                    earliest, best_rank, best = ready, rank, job
            # Forward passes of the first stage wait for no input. They are considered only if no backward pass is ready
            # when the stage becomes free.
            if stage == 0 and free_at[0] < earliest:
                while head < count and forward[0, entering[head]] >= 0.0:
                    head += 1
                for place in range(head, count):
                    job = entering[place]
                    if forward[0, job] >= 0.0 or live[0] + jobs.tokens[0, job] > most[0]:
                        continue
                    if not jobs.linked[job] or forward[0, job - 1] >= 0.0:
                        earliest, best = free_at[0], job
                        break
            begin[stage], chosen[stage], stale[stage] = earliest, best, False
        stage = int(np.argmin(begin))
        job = chosen[stage]
        # No stage can start a pass: too little memory for this order.
        if begin[stage] == np.inf:
            return np.inf
        back = forward[stage, job] >= 0.0
        # The slot leaves the list of this stage for that of the stage with its next pass.
        if back or stage > 0:
            place = 0
            while waiting[stage, place] != job:
                place += 1
            length[stage] -= 1
            waiting[stage, place] = waiting[stage, length[stage]]
        if back:
            free_at[stage] = backward[stage, job] = begin[stage] + jobs.backward[stage, job]
            live[stage] -= jobs.tokens[stage, job]
            next_stage = stage - 1
        else:
            free_at[stage] = forward[stage, job] = begin[stage] + jobs.forward[stage, job]
            live[stage] += jobs.tokens[stage, job]
            next_stage = min(stage + 1, stages - 1)  # the last stage itself runs the backward pass
        if next_stage >= 0:
            waiting[next_stage, length[next_stage]] = job
            length[next_stage] += 1
        if len(passes) > 0:
            passes[number], ends[number] = 2 * (job * stages + stage) + int(back), free_at[stage]
            number += 1
        # The pass changes the free time and the memory of its stage, and the input of a neighbour. The choices of all
        # other stages stay valid.
        for near in range(max(0, stage - 1), min(stages, stage + 2)):
            stale[near] = True
    if len(passes) > 0:
        passes[:] = passes[np.argsort(ends, kind="mergesort")]
    return float(free_at.max())
