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

from engine.compiled import kernel
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


def prove_order(plan: StepPlan) -> None:
    """Raise PlanError(4) where no order of nodes agrees with every edge: then ranks wait for each other for ever."""
    if not _usual(plan):
        _searched(plan)


def node_order(plan: StepPlan) -> Ints:
    """Return all nodes in an order that every edge agrees with. Raises PlanError(4) where there is none."""
    if not _usual(plan):
        return _searched(plan)
    if plan.mode != "pipeline":
        return np.arange(2 * _gangs(plan))
    moment = _moments(plan)
    return grouped(moment, int(moment.max()) + 1)[1]


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


def _usual(plan: StepPlan) -> bool:
    """Return whether there is an order that takes no graph to see.

    Without stages: each rank's gangs ascend, so the nodes' own numbers are an order. In a pipeline: each gang has the
    same place on all of its ranks, so `_moments` gives one.
    """
    if plan.mode != "pipeline":
        return bool(_ascend(plan.gang, plan.micro_start))
    return bool((_places(plan)[plan.gang] == _place(plan)).all())


def _place(plan: StepPlan) -> Ints:
    """Return the place of each micro-batch on its rank, [M]."""
    return np.arange(plan.micro_batches) - plan.micro_start[plan.micro_rank]


def _places(plan: StepPlan) -> Ints:
    """Return the place of each gang on one of its ranks, [G]."""
    places = np.zeros(_gangs(plan), dtype=np.int64)
    places[plan.gang] = _place(plan)
    return places


def _moments(plan: StepPlan) -> Ints:
    """Return when each node would run if all passes took as long, [2Gn].

    The i-th micro-batch of a rank goes forward through stage p at 2i + p, and backward at 2i + 2n - 1 - p. Moments
    ascend in a gang's passes, and on stage p: forward passes have the parity of p, backward ones the other, and before
    backward pass 0, at 2n - 1 - p, come the forward passes 0 .. n - 1 - p, as 1F1B has it.
    """
    stage = np.arange(plan.stages)
    passes = np.stack([stage, 2 * plan.stages - 1 - stage], axis=1).ravel()
    return (2 * _places(plan)[:, None] + passes).ravel()


def _searched(plan: StepPlan) -> Ints:
    nodes = 2 * plan.stages * _gangs(plan)
    order = topological(nodes, *edges(plan))
    if len(order) < nodes:
        stuck = np.setdiff1d(np.arange(nodes), order) // (2 * plan.stages)
        raise PlanError(4, f"gangs {_few(stuck)} wait for each other: the order of their passes has a cycle")
    return order


def _few(gangs: Ints) -> str:
    shown = [str(gang) for gang in np.unique(gangs)[:3].tolist()]
    return ", ".join(shown) + (", ..." if len(np.unique(gangs)) > 3 else "")


@kernel
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


@kernel
def _ascend(gang: Ints, micro_start: Ints) -> bool:
    for rank in range(len(micro_start) - 1):
        for micro in range(micro_start[rank] + 1, micro_start[rank + 1]):
            if gang[micro] <= gang[micro - 1]:
                return False
    return True


@kernel
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
