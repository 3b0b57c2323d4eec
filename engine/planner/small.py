"""Steps so small that a search finds what the skyline misses, and the plan of what it found."""

from __future__ import annotations

import numpy as np

from engine.planner.emit import Placement, build
from engine.planner.free import Candidate
from engine.planner.plan import StepPlan
from engine.planner.problem import Problem
from engine.planner.search import Placed, place, search, times_by_degree
from engine.planner.settings import PlanSettings

_MOST = 64  # sequences times ranks


def is_small(problem: Problem, settings: PlanSettings) -> bool:
    """Return whether a step is searched: on ranks that hold alike, any two of which may become peers."""
    alike = len(set(problem.ranks.holds.tolist())) == 1
    return alike and len(problem.lengths) * settings.ranks <= _MOST and settings.ranks - 1 <= settings.max_peers


def searched(problem: Problem, best: Candidate, settings: PlanSettings) -> StepPlan | None:
    """Return the plan that a search finds, without offload, or None where the candidate is at least as good."""
    ranks, lengths, node_of = problem.ranks, problem.lengths, settings.cluster.node_of
    holds = int(ranks.holds.min())
    times = times_by_degree(problem.rates, lengths, settings.ranks)
    floors = -(-lengths // holds)
    begun = np.maximum(floors, best.rings.degree)
    makespan, order, degree = search(times, problem.rates.micro, lengths, floors, holds, ranks.slow, node_of, begun)
    if makespan >= best.makespan:
        return None
    placed = Placed(np.empty((len(lengths), settings.ranks), dtype=np.int64), np.empty(len(lengths)))
    place(times, problem.rates.micro, lengths, holds, ranks.slow, node_of, order, degree, placed)
    groups = [
        (begin, -1, turn) if size > 1 else (begin, members[0], -1)  # whole sequences that begin together share one
        for begin, size, members, turn in zip(
            placed.begin.tolist(), degree.tolist(), placed.members.tolist(), np.argsort(order).tolist(), strict=True
        )
    ]
    number = {key: index for index, key in enumerate(sorted(set(groups)))}
    back = problem.back
    placement = Placement(
        lengths[back],
        np.array([number[groups[at]] for at in back.tolist()], dtype=np.int64),
        np.concatenate([[0], np.cumsum(degree[back])]),
        np.concatenate([placed.members[at, : degree[at]] for at in back.tolist()]),
    )
    return build("adaptive", settings.mode, settings.ranks, settings.capacity, placement)
