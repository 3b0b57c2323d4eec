"""All that a plan depends on beside the lengths: frozen, picklable, equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.cluster.cluster import Cluster
from engine.config.checks import context_problem, holding, ranks_problem
from engine.config.schema import Config
from engine.config.units import counted, format_apart, format_bytes, format_count
from engine.cost import room
from engine.cost.allowance import Allowance
from engine.cost.model import PPM, Costs
from engine.cost.room import Room
from engine.errors import ConfigError, MemoryFitError

Ints = NDArray[np.int64]

NODE_HOLDS_NOTHING = "leave the node out, take more ranks, or a higher zero.stage"  # ways out, for a hint
# Rings lie on neighbouring ranks, folded (rings.py), so four peers a rank always suffice. A static mesh needs two.
_LEAST_PEERS = {"static": 2, "naive": 4, "balanced": 4, "adaptive": 4}


@dataclass(frozen=True)
class PlanSettings:
    """The planner's input. Capacity and context in tokens, memory in bytes a rank; `offload` in parts per million."""

    planner: str
    mode: str  # "free", "lockstep" or "pipeline"
    stages: int  # of a pipeline, else 1
    cluster: Cluster  # of HDP ranks, with the memory that allowances leave
    capacity: int
    context: int
    max_peers: int
    offload: int  # most of a micro-batch's saved activations that may go to the host, two layers' aside
    host_memory: int  # beside the model states that wait there; negative where they do not fit
    costs: Costs

    @classmethod
    def of(cls, config: Config, refuses: bool = True) -> PlanSettings:
        """Return the settings of a config.

        Raises ConfigError where ranks are too many or hold too little, MemoryFitError where a node's own memory is the
        cause of that, or their host holds too little: not for whoever only wants to know how little (`refuses`).
        """
        cluster = Cluster.of(config.cluster, config.parallel).leaving(Allowance.of(config).usable)
        problems = [ranks_problem(config, cluster.ranks), context_problem(config, cluster.ranks) if refuses else None]
        if found := [problem for problem in problems if problem is not None]:
            raise ConfigError.of(found)
        planner = config.planner
        _check_peers(planner.name, planner.max_peers, cluster.ranks)
        ratio, costs = config.offload.ratio, Costs.of(config)
        if refuses:
            check_host(config, costs)
        settings = cls(
            planner=planner.name,
            mode=_mode(config),
            stages=config.parallel.pp,
            cluster=cluster,
            capacity=config.capacity,
            context=config.context,
            max_peers=planner.max_peers,
            offload=PPM if ratio == "auto" else round(PPM * ratio),
            host_memory=config.cluster.host_memory - costs.host_fixed_bytes,
            costs=costs,
        )
        if refuses:
            settings.check_nodes()
            settings.check_longest(config.context)
        return settings

    def by(self, planner: str) -> PlanSettings:
        """Return the same settings for another planner. Raises ConfigError where it needs more peers."""
        _check_peers(planner, self.max_peers, self.ranks)
        return replace(self, planner=planner)

    def without_offload(self) -> PlanSettings:
        """Return the same settings for a run that offloads nothing."""
        return replace(self, offload=0)

    @property
    def ranks(self) -> int:
        """Return the number of HDP ranks."""
        return self.cluster.ranks

    @cached_property
    def device_memory(self) -> int:
        """Return the usual bytes of a rank: of one whose node names none; where all nodes do, the most of any."""
        usual, has = self.cluster.device_memory, self.cluster.memory
        return usual if (has == usual).any() else int(has.max())

    def room(self, memory: int) -> Room:
        """Return what a rank of so much memory has for a micro-batch."""
        return Room(memory, self.host_memory, self.offload)

    @cached_property
    def capacities(self) -> Ints:
        """Return the tokens that each rank holds in a micro-batch, [P]: capacity follows memory beside model states.

        A rank of the usual memory holds the capacity. One of less memory holds as much of it as fits, one of more in
        proportion; with offload where the usual one needs that for the capacity.
        """
        classes, index = np.unique(self.cluster.memory, return_inverse=True)
        return np.array([self._capacity(memory) for memory in classes.tolist()], dtype=np.int64)[index]

    @property
    def least_capacity(self) -> int:
        """Return the tokens that every rank holds: planners that know one capacity have to plan with it."""
        return int(self.capacities.min())

    def _capacity(self, memory: int) -> int:
        if memory == self.device_memory:
            return self.capacity
        usual = max(1, self.device_memory - self.costs.fixed_bytes)
        in_proportion = max(0, memory - self.costs.fixed_bytes) * self.capacity // usual
        # A host without room for the model states is told by itself (make.py), not as ranks that hold nothing.
        has = Room(memory, max(0, self.host_memory), self.offload if self._offloads else 0)
        return min(max(self.capacity, in_proportion), room.most_tokens(self.costs, has))

    @cached_property
    def _offloads(self) -> bool:
        """Return whether a full capacity of the usual memory is one with offload."""
        return not room.fits(self.costs, self.capacity, self.room(self.device_memory)._replace(offload=0))

    def check_nodes(self) -> None:
        """Raise MemoryFitError for a node whose ranks hold nothing."""
        if self.least_capacity < 1:
            host = self.host(int(np.argmin(self.cluster.memory)))
            message = f"a rank of node {host} holds not one token beside the model states"
            raise MemoryFitError(message, key="cluster.hostfile", hint=NODE_HOLDS_NOTHING)

    def check_longest(self, tokens: int) -> None:
        """Raise ConfigError for a sequence that a ring of all ranks cannot hold; MemoryFitError where a node is why."""
        holds = self.ranks * self.least_capacity
        if tokens <= holds:
            return
        ranks, sequence = counted(self.ranks, "rank"), f"a sequence of {format_count(tokens)} tokens does not fit"
        each = f"{ranks} x capacity {format_count(self.least_capacity)} hold {format_count(holds)}"
        if self.least_capacity >= self.capacity:
            raise ConfigError(f"{sequence}: {each}", key="context", hint=holding(tokens, self.ranks, self.capacity))
        host = self.host(int(np.argmin(self.capacities)))
        message = f"{sequence}: {each}, which is all that the memory of node {host} leaves of capacity={self.capacity}"
        hint = f"context={holds}, or more ranks, or leave the node out"
        raise MemoryFitError(message, key="context", hint=hint)

    def host(self, rank: int) -> str:
        """Return the name of a rank's node."""
        return self.cluster.nodes[int(self.cluster.node_of[rank])].host


def _mode(config: Config) -> str:
    """Return the mode that `auto` means: stages are a pipeline, ZeRO-2/3 meet in slots, ZeRO-1 only at the end."""
    if config.planner.mode != "auto":
        return config.planner.mode
    if config.parallel.pp > 1:
        return "pipeline"
    return "free" if config.zero.stage == 1 else "lockstep"


def check_host(config: Config, costs: Costs) -> None:
    """Refuse a ratio that is asked for where the host has no room for it; `auto` takes what there is."""
    ratio, has = config.offload.ratio, config.cluster.host_memory
    if ratio == "auto" or not ratio:
        return
    away = int(costs.host_bytes(np.int64(config.capacity), round(PPM * ratio)))
    states = costs.host_fixed_bytes
    if states + away <= has:
        return
    needs, holds = format_apart(states + away, has)
    both = f"{format_bytes(away)} on the host beside {format_bytes(states)} of model states, {needs} in all"
    message = (
        f"{ratio:g} of a micro-batch of {format_count(config.capacity)} tokens puts "
        f"{both if states else f'{needs} on the host'}, and cluster.host_memory is {holds} a rank"
    )
    raise MemoryFitError(message, key="offload.ratio", hint="offload.ratio=auto takes what fits, or name more memory")


def _check_peers(planner: str, max_peers: int, ranks: int) -> None:
    least = min(_LEAST_PEERS[planner], ranks - 1)
    if max_peers < least:
        message = f"the {planner} planner may need {counted(least, 'peer')} a rank, not {max_peers}"
        raise ConfigError(message, key="planner.max_peers", hint=f"at least {least}")
