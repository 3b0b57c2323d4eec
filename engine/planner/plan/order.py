"""The order in which ranks run passes, as a graph. Rule 4 of `verify` proves that the graph has no cycle.

A pass is a micro-batch's way through one pipeline stage, forward or backward. Outside pipelines there is one stage, and
a rank runs each micro-batch forward, then backward. A pipeline has a separate order: `StepPlan.passes` lists all passes
of all stages of a rank with L micro-batches; pass (place, stage) forward is the number 2(place n + stage) with n
stages, and backward the number after it, where the place of a micro-batch is its index among those of its rank. A stage
runs its own passes in the order of the list, and a rank with fewer micro-batches leaves out the places that it lacks.

The order of baselines is 1F1B: here 3 stages run 4 micro-batches, stage p starts with n - 1 - p forward passes.

```
 stage 0   F0 F1 F2 B0 F3 B1 B2 B3
 stage 1   F0 F1 B0 F2 B1 F3 B2 B3
 stage 2   F0 B0 F1 B1 F2 B2 F3 B3
```
Transfers between stages. The result of a pass goes to the next stage (forward) or the previous one (backward). Both
devices start their transfers in the order of the passes in the list, each as soon as its own passes before that one
have ended, and a device has at most one transfer under way. Passes do not wait for it, except the one that needs what
arrives. So a stage may run ahead of its neighbour, and results wait in memory.

The graph. Its nodes are the passes of gangs (gang g through stage p: 2(gn + p), backward the node after it), then the
transfers of micro-batches (m across boundary b: 2(m(n - 1) + b), backward the node after it). An edge leads from a node
to one that must wait for it: the next pass of the same stage and rank; the next transfer of the same device; a
transfer from its pass, and from the receiver's last pass before it in the list; and a pass from the transfer of its
input. The simulator (time/makespan.py) runs the same graph.

Note: [plans whose order is known]. For two kinds of plans a topological order is known without a search. All planners
make only these:

- Free and lockstep mode, with gangs that ascend on every rank (emit.py). Node numbers are such an order: each rank runs
  its nodes in ascending order, and the forward pass 2g of a gang comes before its backward pass 2g + 1.
- Pipelines in which each gang has the same place on all of its ranks, and in whose list of passes each pass comes after
  the one whose result it needs. The list is such an order, with each transfer right after its pass: along every edge
  the position in the list does not fall.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from engine.compiled import njit, njit_in_place
from engine.errors import PlanError
from engine.planner.plan.rows import grouped
from engine.planner.plan.step_plan import RankPlan, StepPlan
from engine.units import Bools, Ints


class Pass(NamedTuple):
    """One pass of a micro-batch through a stage."""

    place: int  # of the micro-batch among those of its rank
    forward: bool  # else backward


class Action(NamedTuple):
    """What a device does next: runs a pass, or starts to send its result, or starts to receive that of a neighbour."""

    kind: Literal["run", "send", "receive"]
    done: Pass  # the pass, or the pass whose result is transferred


def one_f_one_b(micro_batches: int, stages: int) -> Ints:
    """Return the passes of a rank with so many micro-batches in 1F1B order, as `StepPlan.passes`.

    Every pass takes one unit of time. Place i runs forward on stage p at time 2i + p, and backward at 2i + 2n - 1 - p.
    These times ascend along the way of a micro-batch. On stage p, forward passes run at p, p + 2, ..., backward passes
    at 2n - 1 - p, 2n + 1 - p, ...: these have different parity, so they alternate, and before backward pass 0 come the
    forward passes 0 .. n - 1 - p.
    """
    stage = np.arange(stages)
    instant = np.stack([stage, 2 * stages - 1 - stage], axis=1).ravel() + 2 * np.arange(micro_batches)[:, None]
    return np.argsort(instant.ravel(), kind="stable").astype(np.int64)


def actions(plan: RankPlan, rank: int, stage: int = 0, *, backward: bool = True) -> list[Action]:
    """Return what the device of one stage of a rank does, in order. Without `backward`, forward passes only."""
    count, stages = plan.count(rank), plan.stages
    if plan.mode != "pipeline":
        ways = (True, False) if backward else (True,)
        return [Action("run", Pass(place, way)) for place in range(count) for way in ways]
    found = []
    for node in plan.passes.tolist():
        (place, at), forward = divmod(node // 2, stages), node % 2 == 0
        if place >= count or not (forward or backward):
            continue
        done, target = Pass(place, forward), at + 1 if forward else at - 1
        if at == stage:
            found.append(Action("run", done))
            if 0 <= target < stages:
                found.append(Action("send", done))
        elif target == stage:
            found.append(Action("receive", done))
    return found


@njit
def execution_order(gang: Ints, micro_start: Ints, stages: int, passes: Ints) -> tuple[Ints, Ints]:
    """Return the passes in the order in which each stage runs them, [2 n M], and where each stage begins, [P n + 1].

    Passes are nodes of the graph, by gang. All stages of rank 0 come first, then those of rank 1, and so on. The
    arguments are fields of the plan; without a pipeline `passes` is empty.
    """
    ranks = len(micro_start) - 1
    nodes = np.empty(2 * stages * len(gang), np.int64)
    start = np.zeros(ranks * stages + 1, np.int64)
    of_stage, order = grouped(passes // 2 % stages, stages)
    at = 0
    for rank in range(ranks):
        mine = gang[micro_start[rank] : micro_start[rank + 1]]
        for stage in range(stages):
            if len(passes) == 0:
                for place in range(len(mine)):
                    nodes[at], nodes[at + 1] = 2 * mine[place], 2 * mine[place] + 1
                    at += 2
            # A rank with fewer micro-batches than others lacks the last places of the list.
            for index in order[of_stage[stage] : of_stage[stage + 1]]:
                place = passes[index] // (2 * stages)
                if place < len(mine):
                    nodes[at] = 2 * (mine[place] * stages + stage) + passes[index] % 2
                    at += 1
            start[rank * stages + stage + 1] = at
    return nodes, start


def nodes(plan: StepPlan) -> int:
    """Return the number of nodes of the graph."""
    return 2 * plan.stages * plan.gangs + 2 * (plan.stages - 1) * plan.micro_batches


def edges(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the edges of the graph as (before, after), both [edges]: node before[i] ends before after[i] begins."""
    order, start = execution_order(plan.gang, plan.micro_start, plan.stages, plan.passes)
    same_stage = np.ones(max(0, len(order) - 1), dtype=bool)
    same_stage[start[1:-1] - 1] = False
    turn = 2 * (np.arange(plan.gangs) * plan.stages + plan.stages - 1)  # the last stage: from forward to backward
    pairs = [(order[:-1][same_stage], order[1:][same_stage]), (turn, turn + 1)]
    if plan.stages > 1:
        pairs.append(_transfer_edges(plan.gang, plan.micro_start, plan.stages, plan.passes, plan.gangs))
    before, after = (np.concatenate(ends) for ends in zip(*pairs, strict=True))
    return before, after


@njit
def _transfer_edges(gang: Ints, micro_start: Ints, stages: int, passes: Ints, gangs: int) -> tuple[Ints, Ints]:
    """Return the edges from and to transfers, as `edges` does."""
    # A transfer has at most five edges: from its pass, to the pass that needs it, and from the three below.
    most = 2 * (stages - 1) * len(gang) * 5
    before, after = np.empty(most, np.int64), np.empty(most, np.int64)
    at, first = 0, 2 * stages * gangs
    for rank in range(len(micro_start) - 1):
        begin, count = micro_start[rank], micro_start[rank + 1] - micro_start[rank]
        ran, moved = np.full(stages, -1), np.full(stages, -1)  # the latest pass and transfer of each device
        for number in passes:
            place, stage, backward = number // (2 * stages), number // 2 % stages, number % 2
            if place >= count:
                continue
            own = 2 * (gang[begin + place] * stages + stage) + backward
            ran[stage] = own
            target = stage - 1 if backward else stage + 1
            if target < 0 or target >= stages:
                continue
            transfer = first + 2 * ((begin + place) * (stages - 1) + min(stage, target)) + backward
            needed_by = 2 * (gang[begin + place] * stages + target) + backward
            before[at], after[at], before[at + 1], after[at + 1] = own, transfer, transfer, needed_by
            at += 2
            # It waits for the receiver's last pass before it in the list, and for the transfers before it on both
            # devices, since each has one under way at a time.
            for waits in (ran[target], moved[stage], moved[target]):
                if waits >= 0:
                    before[at], after[at] = waits, transfer
                    at += 1
            moved[stage] = moved[target] = transfer
    return before[:at], after[:at]


def node_order(plan: StepPlan) -> Ints:
    """Return all nodes of the graph so that each comes after those that it waits for.

    Raises PlanError(4) if no order exists: then the graph has a cycle, and ranks would wait for each other forever.
    """
    # Note: [plans whose order is known]. Any other plan is sorted by Kahn's algorithm.
    if plan.mode != "pipeline":
        if _gangs_ascend(plan.gang, plan.micro_start):
            return np.arange(2 * plan.gangs)
    else:
        place = np.arange(plan.micro_batches) - plan.micro_start[plan.micro_rank]
        gang_place = np.zeros(plan.gangs, dtype=np.int64)
        gang_place[plan.gang] = place
        position = np.empty(len(plan.passes), dtype=np.int64)  # of each pass in the list
        position[plan.passes] = np.arange(len(plan.passes))
        if (gang_place[plan.gang] == place).all() and _ascends(position.reshape(-1, plan.stages, 2)):
            # A pass counts 2 x its position, and the transfer of its result one more, so that it directly follows the
            # pass.
            at = position.reshape(-1, plan.stages, 2)
            moved = np.stack([at[:, :-1, 0], at[:, 1:, 1]], axis=-1)  # [L, n - 1, 2] the passes whose results move
            instant = np.concatenate([2 * at[gang_place].ravel(), 2 * moved[place].ravel() + 1])  # by node
            return grouped(instant, 2 * len(position))[1]
    order = topological(nodes(plan), *edges(plan))
    if len(order) < nodes(plan):
        # The message names gangs only: transfers that wait do so because of passes.
        passes = 2 * plan.stages * plan.gangs
        stuck = np.setdiff1d(np.arange(passes), order[order < passes])
        gangs_ = np.unique(stuck // (2 * plan.stages)).tolist()
        named = ", ".join(map(str, gangs_[:3])) + (", ..." if len(gangs_) > 3 else "")
        raise PlanError(4, f"gangs {named} wait for each other: the order of their passes has a cycle")
    return order


@njit_in_place
def _gangs_ascend(gang: Ints, micro_start: Ints) -> bool:
    """Whether the gangs of each rank's micro-batches ascend."""
    for rank in range(len(micro_start) - 1):
        for micro in range(micro_start[rank] + 1, micro_start[rank + 1]):
            if gang[micro] <= gang[micro - 1]:
                return False
    return True


def _ascends(position: Ints) -> bool:
    """Whether the positions [L, n, 2] of all passes ascend along the way of each micro-batch."""
    way = np.concatenate([position[:, :, 0], position[:, ::-1, 1]], axis=1)
    return bool((np.diff(way, axis=1) > 0).all())


def gang_order(plan: StepPlan) -> Ints:
    """Return all gangs in the order of their first passes in `node_order`, [G]. Raises PlanError(4) for a cycle."""
    order = node_order(plan)
    first = (order < 2 * plan.stages * plan.gangs) & (order % (2 * plan.stages) == 0)
    return order[first] // (2 * plan.stages)


def out_of_order(plan: StepPlan) -> Bools:
    """Return for each shard whether its slice runs before the slice that it continues, [K].

    On each stage, the forward passes of a sequence's slices must ascend, and their backward passes descend: a slice
    attends to the K,V of the earlier ones, and gives them gradients.
    """
    found = np.zeros(len(plan.ring_ranks), dtype=bool)
    shard = np.flatnonzero(plan.before[plan.shard_slice] > 0)
    earlier = shard - plan.degrees[plan.shard_slice[shard]]  # the same part of the slice before
    place = np.arange(plan.micro_batches) - plan.micro_start[plan.micro_rank]
    late, early = place[plan.shard_micro[shard]], place[plan.shard_micro[earlier]]
    passes = plan.passes if plan.mode == "pipeline" else np.arange(2 * (int(place.max()) + 1))
    flat = np.empty(len(passes), dtype=np.int64)
    flat[passes] = np.arange(len(passes))
    position = flat.reshape(-1, plan.stages, 2)
    good = (position[early, :, 0] < position[late, :, 0]) & (position[late, :, 1] < position[early, :, 1])
    found[shard] = ~good.all(axis=1)
    return found


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
