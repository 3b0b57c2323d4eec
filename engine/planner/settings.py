"""All that a plan depends on beside the lengths: frozen, picklable, equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cluster.cluster import Cluster
from engine.config.checks import context_problem
from engine.config.schema import Config
from engine.cost.model import Costs
from engine.errors import ConfigError

# Rings lie on neighbouring ranks, folded (rings.py), so four peers a rank always suffice. A static mesh needs two.
_LEAST_PEERS = {"static": 2, "naive": 4, "balanced": 4}


@dataclass(frozen=True)
class PlanSettings:
    """The planner's input. Capacity and context in tokens, memory in bytes a rank."""

    planner: str
    mode: str  # "free" or "lockstep"
    ranks: int
    capacity: int
    context: int
    max_peers: int
    device_memory: int
    costs: Costs

    @classmethod
    def of(cls, config: Config) -> PlanSettings:
        """Return the settings of a config. Raises ConfigError where its ranks cannot hold or serve its context."""
        cluster = Cluster.of(config.cluster)
        problem = context_problem(config, cluster.ranks)
        if problem is not None:
            raise ConfigError.of([problem])
        planner = config.planner
        _check_peers(planner.name, planner.max_peers, cluster.ranks)
        return cls(
            planner=planner.name,
            mode="free" if planner.mode == "auto" else planner.mode,  # ZeRO-1: ranks meet only at the end of the step
            ranks=cluster.ranks,
            capacity=config.capacity,
            context=config.context,
            max_peers=planner.max_peers,
            device_memory=cluster.device_memory,
            costs=Costs.of(config),
        )


def _check_peers(planner: str, max_peers: int, ranks: int) -> None:
    least = min(_LEAST_PEERS[planner], ranks - 1)
    if max_peers < least:
        message = f"the {planner} planner may need {least} peers a rank, not {max_peers}"
        raise ConfigError(message, key="planner.max_peers", hint=f"at least {least}")
