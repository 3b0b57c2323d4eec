"""The order in which ranks run passes, as a graph. Rule 4 of `verify` proves that the graph has no cycle.

A node is one pass, forward or backward, of one gang through one pipeline stage. With n stages, gang g passes through
stage p forward as node 2(gn + p), and backward as the node after it; without a pipeline n = 1. An edge leads from a
pass to one that must wait for it: the next pass of the same stage and rank, or of the same gang in the next stage.
The simulator (time/makespan.py) runs the same graph.

A pipeline of 3 stages runs 4 micro-batches in 1F1B order; stage p starts with n - 1 - p forward passes:

```
 stage 0   F0 F1 F2 B0 F3 B1 B2 B3
 stage 1   F0 F1 B0 F2 B1 F3 B2 B3
 stage 2   F0 B0 F1 B1 F2 B2 F3 B3
```
Note: [plans whose order is known]. For two kinds of plans a topological order is known without a search. All planners
make only these:

- Free and lockstep mode, with gangs that ascend on every rank (emit.py). Node numbers are such an order: each rank runs
  its nodes in ascending order, and the forward pass 2g of a gang comes before its backward pass 2g + 1.
- Pipelines in which each gang has the same place on all of its ranks: it is their i-th micro-batch. Let every pass take
  one unit of time, and let place i run forward on stage p at time 2i + p, and backward at 2i + 2n - 1 - p. These times
  ascend along every edge. A gang's forward passes ascend with p up to 2i + n - 1; its backward passes start at
  2i + n on the last stage and ascend as p falls. On stage p, forward passes run at p, p + 2, ..., backward passes at
  2n - 1 - p, 2n + 1 - p, ...: these have different parity, so they alternate, and before backward pass 0 come the
  forward passes 0 .. n - 1 - p. That is the 1F1B order of the stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import njit
from engine.errors import PlanError
from engine.planner.plan.rows import grouped
from engine.planner.plan.step_plan import StepPlan
from engine.units import Ints


@njit
def execution_order(gang: Ints, micro_start: Ints, stages: int) -> tuple[Ints, Ints]:
    """Return the nodes in the order in which each stage runs them, [2 n M], and where each stage begins, [P n + 1].

    All stages of rank 0 come first, then those of rank 1, and so on. `gang` and `micro_start` are those of the plan.
    Only this function defines the order on a rank: each micro-batch forward, then backward; in a pipeline 1F1B.
    """
    ranks = len(micro_start) - 1
    nodes = np.empty(2 * stages * len(gang), np.int64)
    start = np.zeros(ranks * stages + 1, np.int64)
    at = 0
    for rank in range(ranks):
        mine = gang[micro_start[rank] : micro_start[rank + 1]]
        for stage in range(stages):
            ahead = min(stages - 1 - stage, len(mine))
            for step in range(len(mine) + ahead):
                if step < len(mine):
                    nodes[at] = 2 * (mine[step] * stages + stage)
                    at += 1
                if step >= ahead:
                    nodes[at] = 2 * (mine[step - ahead] * stages + stage) + 1
                    at += 1
            start[rank * stages + stage + 1] = at
    return nodes, start


class Pass(NamedTuple):
    """One pass of a micro-batch through a stage."""

    place: int  # of the micro-batch among those of its rank
    forward: bool  # else backward


def passes(micro_batches: int, stage: int = 0, stages: int = 1) -> list[Pass]:
    """Return the passes of one stage in the order of `execution_order`, for a rank with so many micro-batches."""
    nodes, start = execution_order(np.arange(micro_batches), np.array([0, micro_batches]), stages)
    own = nodes[start[stage] : start[stage + 1]].tolist()
    return [Pass(node // (2 * stages), node % 2 == 0) for node in own]


def edges(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the edges of the graph as (before, after), both [edges]: node before[i] ends before after[i] begins."""
    nodes, start = execution_order(plan.gang, plan.micro_start, plan.stages)
    same_stage = np.ones(max(0, len(nodes) - 1), dtype=bool)
    same_stage[start[1:-1] - 1] = False
    # [G, 2n] each gang's passes: forward from the first stage to the last, then backward from the last to the first
    forward = 2 * np.arange(plan.stages)
    passes = 2 * plan.stages * np.arange(plan.gangs)[:, None] + np.concatenate([forward, forward[::-1] + 1])
    before = np.concatenate([nodes[:-1][same_stage], passes[:, :-1].ravel()])
    return before, np.concatenate([nodes[1:][same_stage], passes[:, 1:].ravel()])


def node_order(plan: StepPlan) -> Ints:
    """Return all nodes, each a pass of one gang through one stage, so that each comes after those that it waits for.

    Raises PlanError(4) if no order exists: then the graph has a cycle, and ranks would wait for each other forever.
    """
    # Note: [plans whose order is known]. Any other plan is sorted by Kahn's algorithm.
    if plan.mode != "pipeline":
        ascends = np.diff(plan.gang) > 0
        ascends[plan.micro_start[1:-1] - 1] = True  # between two ranks
        if ascends.all():
            return np.arange(2 * plan.gangs)
    else:
        place = np.arange(plan.micro_batches) - plan.micro_start[plan.micro_rank]
        gang_place = np.zeros(plan.gangs, dtype=np.int64)
        gang_place[plan.gang] = place
        if (gang_place[plan.gang] == place).all():
            stage = np.arange(plan.stages)
            passes = np.stack([stage, 2 * plan.stages - 1 - stage], axis=1).ravel()
            instant = (2 * gang_place[:, None] + passes).ravel()  # by node
            return grouped(instant, int(instant.max()) + 1)[1]
    nodes = 2 * plan.stages * plan.gangs
    order = topological(nodes, *edges(plan))
    if len(order) < nodes:
        stuck = np.unique(np.setdiff1d(np.arange(nodes), order) // (2 * plan.stages)).tolist()
        gangs = ", ".join(map(str, stuck[:3])) + (", ..." if len(stuck) > 3 else "")
        raise PlanError(4, f"gangs {gangs} wait for each other: the order of their passes has a cycle")
    return order


def gang_order(plan: StepPlan) -> Ints:
    """Return all gangs in the order of their first passes in `node_order`, [G]. Raises PlanError(4) for a cycle."""
    order = node_order(plan)
    return order[order % (2 * plan.stages) == 0] // (2 * plan.stages)


@njit
def topological(nodes: int, before: Ints, after: Ints) -> Ints:
    """Sort nodes topologically (Kahn's algorithm). The result lacks the nodes on a cycle and those that follow one.

    Edge i leads from node before[i] to node after[i].
    """
    start, edge = grouped(before, nodes)
    waits = np.zeros(nodes, np.int64)  # by node: edges into it from nodes that are not in the order yet
    for node in after:
        waits[node] += 1
    order = np.empty(nodes, np.int64)
    found = 0
    for node in range(nodes):
        if waits[node] == 0:
            order[found] = node
            found += 1
    done = 0
    while done < found:
        for place in range(start[order[done]], start[order[done] + 1]):
            head = after[edge[place]]
            waits[head] -= 1
            if waits[head] == 0:
                order[found] = head
                found += 1
        done += 1
    return order[:found]
