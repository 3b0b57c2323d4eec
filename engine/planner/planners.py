"""The table of planners. To add one, write its function and an entry; everything else is read from the entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.tables import Table, lazy

if TYPE_CHECKING:
    from engine.planner.plan.step_plan import StepPlan
    from engine.planner.settings import PlanSettings
    from engine.units import Ints

_LOWER_BOUND = lazy("engine.planner.adaptive.workload:lower_bound")


@dataclass(frozen=True)
class Planner:
    """A planner, and what others need to know of it. Letters: P ranks, S sequences.

    plan: returns the plan of a step for the lengths of its sequences, [S], in the mode of the settings if that is one
        of `modes`, else in free mode: its plan is then converted (make.py).
    modes: "free", which every planner has, "lockstep", "pipeline".
    peers: returns the HDP ranks with which the rings of each rank may exchange messages in any step, [P, N], where the
        rank itself and repetitions count for nothing. They are connected before the first step; `verify` rejects a plan
        with others.
    most_peers: of a rank in one step; in a smaller world, all other ranks. The memory estimate has room for so many.
    by_equation_3: offloads by equation 3 of the paper, not only what the capacity needs (ratios.py).
    bound: returns a lower bound of the time of a step, in ns, for `tune`.
    tight_bound: the bound is nearly that time, and cheap.
    """

    plan: Callable[[Ints, PlanSettings], StepPlan]
    modes: tuple[str, ...]
    peers: Callable[[PlanSettings], Ints]
    most_peers: int
    by_equation_3: bool = False
    bound: Callable[[Ints, PlanSettings], float] = _LOWER_BOUND
    tight_bound: bool = False

    def __post_init__(self) -> None:
        if "free" not in self.modes:
            raise TypeError("a planner needs the mode free: from its plans those of other modes are made")


PLANNERS: Table[Planner] = Table(
    Planner,
    {
        "static": Planner(
            plan=lazy("engine.planner.baselines.static:static"),
            modes=("free",),
            peers=lazy("engine.planner.baselines.static:peers"),
            most_peers=2,
            bound=lazy("engine.planner.baselines.static_bound:static_bound"),
            tight_bound=True,
        ),
        "naive": Planner(
            plan=lazy("engine.planner.baselines.naive:naive"),
            modes=("free",),
            peers=lazy("engine.planner.plan.rings:peers"),
            most_peers=4,
            by_equation_3=True,
        ),
        "balanced": Planner(
            plan=lazy("engine.planner.baselines.balanced:balanced"),
            modes=("free", "pipeline"),
            peers=lazy("engine.planner.plan.rings:peers"),
            most_peers=4,
            by_equation_3=True,
        ),
        "adaptive": Planner(
            plan=lazy("engine.planner.adaptive.adaptive:adaptive"),
            modes=("free", "lockstep", "pipeline"),
            peers=lazy("engine.planner.adaptive.adaptive:peers"),
            most_peers=4,
        ),
    },
)


def peers_of(rank: int, settings: PlanSettings) -> list[int]:
    """Return the HDP ranks with which rings may exchange messages with `rank`, in ascending order.

    If one rank is in another's list, the other is in its list too. Plans may use fewer.
    """
    peers = PLANNERS[settings.planner].peers(settings)
    names_it = np.flatnonzero((peers == rank).any(axis=1))
    return sorted({*peers[rank].tolist(), *names_it.tolist()} - {rank})
