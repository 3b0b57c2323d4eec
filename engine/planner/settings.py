"""Everything that a plan depends on besides the lengths: frozen, picklable, equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from engine.cluster.cluster import Cluster
from engine.config.schema import Config
from engine.cost.allowance import Allowance
from engine.cost.budget import Budget, fits, most_tokens
from engine.cost.model import Costs
from engine.planner.time.bound import Kinds, kinds_of
from engine.units import PPM, Floats, Ints


@dataclass(frozen=True)
class PlanSettings:
    """The planner's settings. Capacity and context are in tokens, memory is in bytes per rank."""

    planner: str
    mode: str  # "free", "lockstep" or "pipeline"
    stages: int  # pipeline stages; 1 in other modes
    cluster: Cluster  # the HDP ranks, with the memory that tensors may use
    capacity: int
    context: int
    max_peers: int  # most ranks that a rank may exchange messages with
    offload: int  # largest allowed offload ratio, ppm
    host_memory: int  # host memory minus headroom and the model states there; negative if these do not fit
    costs: Costs
    equation_3: bool = True  # whether naive and balanced offload by this equation, or only what a capacity needs

    @classmethod
    def of(cls, config: Config, cluster: Cluster, costs: Costs) -> PlanSettings:
        """Build the settings of a config. Does not check that it fits in memory or can be planned (fit/check.py).

        `cluster` has the devices as ranks. Raises ConfigError as `Cluster.hdp`.
        """
        ratio, mode = config.offload.ratio, config.planner.mode
        allowance, host_memory = Allowance.of(config, cluster), config.cluster.host_memory
        if mode == "auto":
            # Stages are a pipeline. ZeRO-2 and ZeRO-3 reduce or gather in every slot, ZeRO-1 only at the end of a step;
            # expert parallelism exchanges tokens in every layer.
            free = config.zero.stage == 1 and config.parallel.ep == 1
            mode = "pipeline" if config.parallel.pp > 1 else "free" if free else "lockstep"
        return cls(
            planner=config.planner.name,
            mode=mode,
            stages=config.parallel.pp,
            cluster=cluster.hdp(config.parallel).with_memory(allowance.usable),
            capacity=config.capacity,
            context=config.context,
            max_peers=config.planner.max_peers,
            offload=PPM if ratio == "auto" else round(PPM * ratio),
            host_memory=host_memory - allowance.free(host_memory) - costs.host_fixed_bytes,
            costs=costs,
        )

    def by(self, planner: str) -> PlanSettings:
        """The same settings for another planner."""
        return replace(self, planner=planner)

    def without_offload(self) -> PlanSettings:
        """The same settings for a run that offloads nothing."""
        return self._without_offload if self.offload else self

    @cached_property
    def _without_offload(self) -> PlanSettings:
        return replace(self, offload=0)

    @property
    def ranks(self) -> int:
        """Number of HDP ranks."""
        return self.cluster.ranks

    @cached_property
    def device_memory(self) -> int:
        """Memory of a usual rank, in bytes: that of nodes that state no `memory`; the largest if every node does."""
        usual, has = self.cluster.device_memory, self.cluster.memory
        return usual if (has == usual).any() else int(has.max())

    def budget(self, memory: int) -> Budget:
        """The memory budget of a rank whose device has `memory` bytes for tensors."""
        return Budget(memory, self.host_memory, self.offload)

    @cached_property
    def capacities(self) -> Ints:
        """The capacity of each rank, in tokens, [P].

        A rank with the usual memory has the capacity of the config. One with less memory has as much of this capacity
        as fits. One with more memory has a larger capacity, in proportion to the memory that the model states leave.
        Offload counts only if the usual rank needs it for its capacity.
        """
        usual, states = self.device_memory, self.costs.fixed_bytes
        classes, index = np.unique(self.cluster.memory, return_inverse=True)
        held = np.full(len(classes), self.capacity, dtype=np.int64)
        if len(classes) == 1:
            return held[index]
        # If the host is too small for the model states, checks.py reports that, not ranks without capacity.
        offloads = not fits(self.costs, self.capacity, self.budget(usual)._replace(offload=0))
        budget = Budget(0, max(0, self.host_memory), self.offload if offloads else 0)
        for number, memory in enumerate(classes.tolist()):
            if memory != usual:
                in_proportion = max(0, memory - states) * self.capacity // max(1, usual - states)
                most = most_tokens(self.costs, budget._replace(memory=memory))
                held[number] = min(max(self.capacity, in_proportion), most)
        return held[index]

    @cached_property
    def least_capacity(self) -> int:
        """The smallest capacity of all ranks, for planners that use one capacity for all."""
        return int(self.capacities.min())

    @cached_property
    def largest_capacity(self) -> int:
        """The largest capacity of all ranks."""
        return int(self.capacities.max())

    @cached_property
    def most_without_offload(self) -> int:
        """Most tokens of a micro-batch, all in rings, that fit on every device without offload; 0 if none.

        Smaller micro-batches fit too.
        """
        return self.costs.most_tokens(int(self.cluster.memory.min()))

    @property
    def full_fits(self) -> bool:
        """Whether a micro-batch of the largest capacity, all in rings, fits on every device without offload."""
        return self.most_without_offload >= self.largest_capacity

    @cached_property
    def alike(self) -> bool:
        """Whether all ranks have the same capacity and memory."""
        capacities, memory = self.capacities, self.cluster.memory
        return bool((capacities == capacities[0]).all() and (memory == memory[0]).all())

    def largest_shard(self, capacity: int, memory: int) -> int:
        """Most tokens of a shard with as much offload as allowed, at least the capacity, on a rank with this capacity,
        in tokens, and this memory, in bytes."""
        return max(capacity, most_tokens(self.costs, self.budget(memory), capacity))

    @cached_property
    def largest_shards(self) -> Ints:
        """`largest_shard` of each rank, [P]."""
        classes, index = np.unique(np.stack([self.capacities, self.cluster.memory]), axis=1, return_inverse=True)
        found = [self.largest_shard(int(capacity), int(memory)) for capacity, memory in classes.T.tolist()]
        return np.array(found, dtype=np.int64)[index.ravel()]

    @cached_property
    def slow(self) -> Floats:
        """How many times slower than full speed each rank is, [P]."""
        return 100.0 / self.cluster.speed

    @cached_property
    def kinds(self) -> Kinds:
        """The kinds of ranks by speed."""
        return kinds_of(self.slow)

    def host(self, rank: int) -> str:
        """Host name of a rank's node."""
        return self.cluster.nodes[int(self.cluster.node_of[rank])].host
