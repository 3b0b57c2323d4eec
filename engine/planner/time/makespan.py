"""The time at which each micro-batch of a plan runs, and the makespan: the time until the last rank finishes.

Planners compare plans by the makespan, and the simulator shows it. In free mode a gang starts when all of its ranks
have finished their earlier gangs; in lockstep mode a slot starts when all ranks have finished the previous slot. In a
pipeline of n stages each pass of a gang runs on a stage as early as the order of passes and transfers allows
(order.py). A stage takes its share of a gang's time (`Costs.shares`). The transfers of activations between stages are
small: they take no time, but each waits for the earlier ones of its two devices.

Ranks that the plan marks reduce gradients within their last backward pass. A bucket is reduced once all ranks have its
gradients, which come evenly over a pass; the last bucket is complete when the last rank finishes. Reductions are taken
to slow no computation down.

```
 rank 0   |        backward      |
 rank 1           | backward |            it has its first bucket last
 reduction          |==========|==|       hidden | exposed, at least the last bucket
```
Letters: G gangs, M micro-batches, P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import njit
from engine.cost.model import Costs
from engine.planner.plan.order import edges, gang_order, node_order, nodes
from engine.planner.plan.rows import grouped
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.planner.time.durations import Gangs, by_slot, gang_times
from engine.units import Floats, Ints


class Timing(NamedTuple):
    """Nanoseconds from the start of the step. In a pipeline, start and stop are those on the first stage."""

    start: Floats  # [M]
    stop: Floats  # [M]
    makespan: float
    hidden: float = 0.0  # ns of the reduction of gradients that run within last backward passes


def reduction_end(plan: StepPlan, settings: PlanSettings) -> float:
    """Return the time at which a plan's gradients are reduced, in ns. Candidates of free mode are compared by it."""
    timed = timing(plan, gang_times(plan, settings.costs, settings.cluster), settings.costs)
    return timed.makespan + settings.costs.reduction - timed.hidden


def makespan(plan: StepPlan, settings: PlanSettings) -> float:
    """Return the makespan of a plan, in ns."""
    return timing(plan, gang_times(plan, settings.costs, settings.cluster), settings.costs).makespan


def timing(plan: StepPlan, gangs: Gangs, costs: Costs) -> Timing:
    """Return when the micro-batches of a plan run, given the durations of its gangs."""
    if plan.mode == "lockstep":
        forward, backward = by_slot(plan, gangs, costs)
        ends = np.cumsum(forward + backward + costs.slot)
        start, stop = np.concatenate([[0.0], ends[:-1]])[plan.slot], ends[plan.slot]
        return Timing(start, stop, float(stop.max()))
    if plan.mode == "free":
        first, members = grouped(plan.gang, plan.gangs)
        start, stop = _free(gang_order(plan), first, members, plan.micro_rank, gangs.forward + gangs.backward)
        last = plan.micro_start[1:] - 1
        passes = plan.overlap * gangs.backward[plan.gang[last]]
        first_bucket = float((stop[last] - (1 - costs.last_bucket) * passes).max())  # the last rank has it
        finished = float(stop.max())
        return Timing(start, stop, finished, min(finished - first_bucket, costs.most_hidden))
    stages = plan.stages
    if len(costs.stages) != stages:
        raise ValueError(f"the costs are those of {len(costs.stages)} stages, and the plan has {stages}")
    # The end of a step is the longest path through the graph of order.py. Its transfers have no duration, but order the
    # passes.
    both = np.stack([gangs.forward, gangs.backward], axis=1)
    passes = (both[:, None, :] * costs.shares[:, None]).ravel()
    durations = np.concatenate([passes, np.zeros(nodes(plan) - len(passes))])  # by node
    before, after = edges(plan)
    first_edge, edge = grouped(before, len(durations))
    end = _longest_paths(node_order(plan), first_edge, after[edge], durations)
    # The first stage's forward pass of a gang begins its run there, and its backward pass, the next node, ends it.
    node = 2 * plan.gang * stages
    return Timing(end[node] - durations[node], end[node + 1], float(end.max()))


@njit
def _free(order: Ints, first: Ints, members: Ints, rank: Ints, durations: Floats) -> tuple[Floats, Floats]:
    """Return start and stop of each micro-batch, [M]: gangs run in `order`, each as soon as all its ranks are ready.

    Gang g has the micro-batches members[first[g] : first[g + 1]] and takes durations[g] ns; rank [M] is the rank of
    each micro-batch.
    """
    ready = np.zeros(rank[-1] + 1)
    start, stop = np.zeros(len(members)), np.zeros(len(members))
    for g in order:
        begin = 0.0
        for m in members[first[g] : first[g + 1]]:
            begin = max(begin, ready[rank[m]])
        for m in members[first[g] : first[g + 1]]:
            start[m], stop[m] = begin, begin + durations[g]
            ready[rank[m]] = stop[m]
    return start, stop


@njit
def _longest_paths(order: Ints, start: Ints, following: Ints, durations: Floats) -> Floats:
    """Return when each node ends if it begins as soon as all nodes before it have ended: the longest path to it.

    `order` is a topological order; edges lead from node i to following[start[i] : start[i + 1]].
    """
    begin, end = np.zeros(len(durations)), np.zeros(len(durations))
    for node in order:
        end[node] = begin[node] + durations[node]
        for place in range(start[node], start[node + 1]):
            begin[following[place]] = max(begin[following[place]], end[node])
    return end
