"""In which order ranks run, as a graph of passes: what rule 4 of `verify` proves, and what the simulator follows.

A node is one pass of a gang through one stage. Without a pipeline there is one stage, and node 2g is the forward pass
of gang g, node 2g + 1 its backward pass; with n stages the passes of gang g through stage p are 2(gn + p) and the next.

A pipeline of 3 stages runs 4 micro-batches in 1F1B order: stage p begins with n - 1 - p forward passes.

```
 stage 0   F0 F1 F2 B0 F3 B1 B2 B3
 stage 1   F0 F1 B0 F2 B1 F3 B2 B3
 stage 2   F0 B0 F1 B1 F2 B2 F3 B3
```
"""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.errors import PlanError
from engine.planner.plan import Ints, StepPlan
from engine.planner.rows import grouped


def execution_order(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the nodes that each stage of each rank runs, in its order, and where each stage's begin, [P n + 1].

    The stages of a rank follow each other, then those of the next rank. Only this function knows: each micro-batch runs
    forward, then backward, in a pipeline in 1F1B order.
    """
    return _execution_order(plan.gang, plan.micro_start, plan.stages)


def edges(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the edges (before, after) between nodes: a stage runs one after the other; a pass goes through all stages.

    A gang goes forward from the first stage to the last, then backward from the last to the first.
    """
    nodes, start = execution_order(plan)
    within = np.ones(max(0, len(nodes) - 1), dtype=bool)
    within[start[1:-1] - 1] = False
    passes = _through(np.arange(_gangs(plan)), plan.stages)
    before = np.concatenate([nodes[:-1][within], passes[:, :-1].ravel()])
    return before, np.concatenate([nodes[1:][within], passes[:, 1:].ravel()])


def node_order(plan: StepPlan) -> Ints:
    """Return all nodes in an order that every edge agrees with.

    Raises PlanError(4) where no such order exists: then ranks wait for each other for ever. Where the usual order is
    one, which takes no graph to see, it is taken.
    """
    moment = _moments(plan)
    if _ascends(*execution_order(plan), moment):
        return grouped(moment, int(moment.max()) + 1)[1]
    order = topological(len(moment), *edges(plan))
    if len(order) < len(moment):
        stuck = np.setdiff1d(np.arange(len(moment)), order) // (2 * plan.stages)
        raise PlanError(4, f"gangs {_few(stuck)} wait for each other: the order of their passes has a cycle")
    return order


def gang_order(plan: StepPlan) -> Ints:
    """Return all gangs, numbered from 0, in the order of their first passes in `node_order`. Raises as that does."""
    order = node_order(plan)
    return order[order % (2 * plan.stages) == 0] // (2 * plan.stages)


def topological(nodes: int, before: Ints, after: Ints) -> Ints:
    """Return the nodes in an order that all edges agree with; those on a cycle, or behind one, are missing (Kahn)."""
    start, edge = grouped(before, nodes)
    return _topological(start, after[edge])


def _gangs(plan: StepPlan) -> int:
    return int(plan.gang.max()) + 1


def _through(gangs: Ints, stages: int) -> Ints:
    """Return the nodes of each gang in the order of its passes, [G, 2n]."""
    forward = 2 * np.arange(stages)
    return 2 * stages * gangs[:, None] + np.concatenate([forward, forward[::-1] + 1])


def _moments(plan: StepPlan) -> Ints:
    """Return when each node would run if all passes took as long, [2Gn]: a guess, which the caller checks.

    The i-th micro-batch goes forward through stage p at 2i + p, and backward at 2i + 2n - 1 - p; so the passes of a
    gang ascend, whatever i is. In a pipeline i is the gang's place on one of its ranks: if it is the same on all of
    them, each stage's order ascends too. Without stages i is the gang's number.
    """
    place = np.arange(_gangs(plan))
    if plan.mode == "pipeline":
        place[plan.gang] = np.arange(plan.micro_batches) - plan.micro_start[plan.micro_rank]
    stage = np.arange(plan.stages)
    passes = np.stack([stage, 2 * plan.stages - 1 - stage], axis=1).ravel()
    return (2 * place[:, None] + passes).ravel()


def _few(gangs: Ints) -> str:
    shown = [str(gang) for gang in np.unique(gangs)[:3].tolist()]
    return ", ".join(shown) + (", ..." if len(np.unique(gangs)) > 3 else "")


@njit(cache=True)
def _execution_order(gang: Ints, micro_start: Ints, stages: int) -> tuple[Ints, Ints]:
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


@njit(cache=True)
def _ascends(nodes: Ints, start: Ints, moment: Ints) -> bool:
    for line in range(len(start) - 1):
        for place in range(start[line] + 1, start[line + 1]):
            if moment[nodes[place]] <= moment[nodes[place - 1]]:
                return False
    return True


@njit(cache=True)
def _topological(start: Ints, heads: Ints) -> Ints:
    """Return the order; the edges from node i go to heads[start[i]] .. heads[start[i + 1] - 1]."""
    nodes = len(start) - 1
    waits = np.zeros(nodes, np.int64)
    for head in heads:
        waits[head] += 1
    order = np.empty(nodes, np.int64)
    found = 0
    for node in range(nodes):
        if waits[node] == 0:
            order[found] = node
            found += 1
    done = 0
    while done < found:
        for head in heads[start[order[done]] : start[order[done] + 1]]:
            waits[head] -= 1
            if waits[head] == 0:
                order[found] = head
                found += 1
        done += 1
    return order[:found]
