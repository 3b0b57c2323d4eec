"""In which order ranks run, as a graph of gangs: what rule 4 of `verify` proves, and what the simulator follows.

Node 2g is the forward pass of gang g, node 2g + 1 its backward pass.
"""

from __future__ import annotations

import numpy as np

from engine.errors import PlanError
from engine.planner.plan import Ints, StepPlan


def execution_order(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the nodes that each rank runs, in its order, rank after rank, and where each rank's begin, [P + 1].

    Each micro-batch runs forward, then backward. Only this function knows; a pipeline's 1F1B order will stand here.
    """
    nodes = np.stack([2 * plan.gang, 2 * plan.gang + 1], axis=1).ravel()
    return nodes, 2 * plan.micro_start


def edges(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the edges (before, after) between nodes: each rank runs one after the other."""
    nodes, start = execution_order(plan)
    within = np.ones(len(nodes) - 1, dtype=bool)
    within[start[1:-1] - 1] = False
    return nodes[:-1][within], nodes[1:][within]


def gang_order(plan: StepPlan) -> Ints:
    """Return all gangs in an order that every rank's order agrees with.

    Gangs are numbered from 0. Raises PlanError(4) where no such order exists: then ranks wait for each other for ever.
    """
    before, after = edges(plan)
    nodes = 2 * int(plan.gang.max()) + 2
    if bool((before < after).all()):  # the gangs' own numbers are such an order: checked here, trusted nowhere
        return np.arange(nodes // 2, dtype=np.int64)
    order = topological(nodes, before, after)
    if len(order) < nodes:
        stuck = np.setdiff1d(np.arange(nodes), order) // 2
        raise PlanError(4, f"gangs {_few(stuck)} wait for each other: the order of their passes has a cycle")
    return np.array([node // 2 for node in order if node % 2 == 0], dtype=np.int64)


def topological(nodes: int, before: Ints, after: Ints) -> list[int]:
    """Return the nodes in an order that all edges agree with; those on a cycle, or behind one, are missing (Kahn)."""
    waits = np.bincount(after, minlength=nodes).tolist()
    by_tail = np.argsort(before, kind="stable")
    heads = after[by_tail].tolist()
    first = np.searchsorted(before[by_tail], np.arange(nodes + 1)).tolist()
    order = [node for node in range(nodes) if waits[node] == 0]
    for node in order:  # grows as nodes become free
        for head in heads[first[node] : first[node + 1]]:
            waits[head] -= 1
            if waits[head] == 0:
                order.append(head)
    return order


def _few(gangs: Ints) -> str:
    shown = [str(gang) for gang in np.unique(gangs)[:3].tolist()]
    return ", ".join(shown) + (", ..." if len(np.unique(gangs)) > 3 else "")
