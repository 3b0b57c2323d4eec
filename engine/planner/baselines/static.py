"""The baseline: a fixed mesh of data-parallel groups, each a ring of context-parallel ranks, with packing.

It is as strong as the paper's baseline: the smallest degree that divides the world size and fits the longest allowed
sequence, packed micro-batches, balanced causal shards, and micro-batches assigned by cost.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from engine.planner.baselines.pack import best_bins
from engine.planner.plan.emit import Placement, build
from engine.planner.plan.rings import folded
from engine.planner.plan.rows import grouped, row_of_each
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.units import Ints


class Mesh(NamedTuple):
    """The micro-batches of a step on the mesh, in the order in which they run.

    Micro-batch m has the sequences sequences[start[m] : start[m + 1]]; group g has the ranks g CP .. (g + 1) CP - 1.
    """

    cp: int  # ranks of a group
    start: Ints  # [M + 1]
    sequences: Ints  # [S]
    group: Ints  # [M]


def static(lengths: Ints, settings: PlanSettings, hop: int | None = None) -> StepPlan:
    """Plan a step in free mode on a mesh of DP x CP ranks; every sequence is split over all CP ranks of its group.

    Rings are in ascending order. With `hop`, those whose last and first rank are further apart than that are folded.
    """
    mesh = assigned(lengths, settings)
    micro_batch, first = np.empty_like(lengths), np.empty_like(lengths)
    micro_batch[mesh.sequences] = row_of_each(mesh.start)
    first = mesh.group[micro_batch] * mesh.cp
    ring_start = np.arange(len(lengths) + 1) * mesh.cp
    order = np.arange(mesh.cp)
    if hop is not None and hop < min(mesh.cp - 1, settings.ranks - mesh.cp + 1):
        order = folded(0, mesh.cp, settings.ranks)
    ring_ranks = (first[:, None] + order).ravel()
    placed = Placement(lengths, micro_batch, ring_start, ring_ranks)
    return build("static", "free", settings.ranks, settings.capacity, placed)


def assigned(lengths: Ints, settings: PlanSettings) -> Mesh:
    """Pack the sequences into micro-batches, and assign these to the groups of the mesh.

    Sequences are packed best-fit, in descending order of ceil(s / CP), the largest shard of a sequence of s tokens, so
    that micro-batches fit all ranks of a group. Micro-batches go to groups by longest processing time first. Very short
    sequences leave ranks of a ring without a token, as in real static context parallelism. All ranks use the
    smallest capacity.
    """
    cp, costs = degree(settings), settings.costs
    order = np.argsort(-lengths, kind="stable")
    bins = best_bins(-(-lengths[order] // cp), settings.least_capacity)
    start, items = grouped(bins, int(bins.max()) + 1)
    work = np.add.reduceat(costs.sequence(lengths)[order[items]], start[:-1]) // cp + costs.fixed
    # The most expensive micro-batches run first.
    ranked = np.argsort(-work, kind="stable")
    free = [(0, group) for group in range(settings.ranks // cp)]
    group = np.empty_like(ranked)
    for place, time in enumerate(work[ranked].tolist()):
        load, group[place] = free[0]
        heapq.heapreplace(free, (load + time, int(group[place])))
    place_of = np.empty_like(ranked)
    place_of[ranked] = np.arange(len(ranked))
    start, items = grouped(place_of[bins], len(ranked))
    return Mesh(cp, start, order[items], group)


def peers(settings: PlanSettings) -> Ints:
    """Return the ranks before and after each rank in the rings of its group, [P, 2]."""
    cp, rank = degree(settings), np.arange(settings.ranks)[:, None]
    first = rank - rank % cp
    return first + (rank - first + np.array([-1, 1])) % cp


def degree(settings: PlanSettings) -> int:
    """Context-parallel degree of the run: the smallest divisor of the number of ranks at which `context` tokens fit.

    The number of ranks if `context` tokens do not fit at any degree.
    """
    ranks = settings.ranks
    divisors = (cp for cp in range(1, ranks) if ranks % cp == 0)
    return next((cp for cp in divisors if cp * settings.least_capacity >= settings.context), ranks)
