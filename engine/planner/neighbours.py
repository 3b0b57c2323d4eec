"""The ranks that a rank's rings may reach, known before any step is planned."""

from __future__ import annotations

from engine.planner.baselines.static import degree
from engine.planner.settings import PlanSettings


def neighbours(rank: int, settings: PlanSettings) -> list[int]:
    """Return the HDP ranks with which rings of this planner exchange messages with `rank`, in ascending order.

    Folded rings go to ranks at most two away (plan/rings.py), in a circle of all ranks, and at most two teams away if
    they have teams. The rings of a static mesh are its groups in ascending order. If one rank is in another's list, the
    other is in its list too. Plans may use fewer.
    """
    if settings.planner != "static":
        far = 2 * (settings.costs.rates.team if settings.planner == "adaptive" else 1)
        return sorted({(rank + hop) % settings.ranks for hop in range(-far, far + 1)} - {rank})
    cp = degree(settings)
    first = rank - rank % cp
    return sorted({first + (rank - first + hop) % cp for hop in (-1, 1)} - {rank})
