"""The cluster as nodes and ranks, with the speed and memory of each rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np

from engine.cluster import hostfile
from engine.cluster.hostfile import Node
from engine.cluster.mesh import Mesh
from engine.config import schema
from engine.config.units import counted
from engine.errors import ConfigError
from engine.units import Ints


@dataclass(frozen=True)
class Cluster:
    """Nodes in order. Ranks are numbered node by node, so the ranks of a node are consecutive.

    A rank is one device, or one HDP rank of tp x pp devices in the cluster that `hdp` returns.
    """

    nodes: tuple[Node, ...]
    device_memory: int  # bytes per rank, for nodes that do not set their own

    @classmethod
    def of(cls, config: schema.Cluster, nodes: tuple[Node, ...]) -> Cluster:
        """Make the cluster of a config, whose nodes are those of `nodes_of`. Ranks are devices.

        Speeds that are a list replace those of the hostfile; measured ones become a list before a run starts. Raises
        ConfigError if the list has another length.
        """
        if isinstance(config.speeds, tuple):
            if len(config.speeds) != len(nodes):
                message = f"has {counted(len(config.speeds), 'speed')} for {counted(len(nodes), 'node')}"
                raise ConfigError(message, key="cluster.speeds", hint="give one for each node, such as [100,80]")
            nodes = tuple(replace(node, speed=speed) for node, speed in zip(nodes, config.speeds, strict=True))
        return cls(nodes, config.device_memory)

    def hdp(self, parallel: schema.Parallel) -> Cluster:
        """Group the devices into HDP ranks of tp x pp devices, placed as in `Mesh`; return the cluster of these ranks.

        The tp devices of a stage are neighbours, and stages are on different nodes where possible. Rings connect
        devices of one stage, so a rank belongs to the node of its first stage; nodes without a first stage are left
        out. A rank whose tp devices fill several nodes forms a separate node. A rank has the speed of its slowest
        device and the memory of its smallest.

        Raises ConfigError if tp x pp does not divide the devices, if ep does not divide the HDP ranks, or if the tp
        devices of a stage would be parts of two nodes.
        """
        tp, pp = parallel.tp, parallel.pp
        if self.ranks // (tp * pp) % parallel.ep:
            message = f"{parallel.ep} does not divide {counted(self.ranks // (tp * pp), 'HDP rank')}"
            raise ConfigError(message, key="parallel.ep", hint="choose a divisor of the number of HDP ranks")
        if tp == pp == 1:
            return self
        if self.ranks % (tp * pp):
            message = f"parallel.tp x parallel.pp = {tp * pp} does not divide {counted(self.ranks, 'device')}"
            key = "parallel.tp" if self.ranks % tp else "parallel.pp"
            hint = "choose degrees whose product divides the number of devices"
            if smaller := self._smaller_mesh(parallel):
                hint += ", such as parallel.tp={} parallel.pp={}".format(*smaller)
            raise ConfigError(message, key=key, hint=hint + self._odd_node(tp * pp))
        devices = Mesh.of(self.ranks, parallel).devices()

        # The cost model knows all-reduces over tp devices inside one node or across whole nodes only.
        first, last = devices[..., 0].ravel(), devices[..., -1].ravel()
        in_one_node = self.node_of[first] == self.node_of[last]
        of_whole_nodes = np.isin(first, self._first_ranks) & np.isin(last + 1, self._first_ranks)
        split = np.flatnonzero(~in_one_node & ~of_whole_nodes)
        if len(split):
            hosts = [self.nodes[self.node_of[end[split[0]]]].host for end in (first, last)]
            message = f"parallel.tp={tp} puts devices of {hosts[0]} and of {hosts[1]} into one rank"
            hint = "choose a degree that divides the number of devices of each node"
            raise ConfigError(message, key="parallel.tp", hint=hint)

        # A rank belongs to the node of its first device. `begin`: the first rank of each node that has ranks.
        homes, begin = np.unique(self.node_of[devices[0, :, 0]], return_index=True)
        speeds, memories = (
            np.minimum.reduceat(each[devices].min(axis=(0, 2)), begin).tolist() for each in (self.speed, self.memory)
        )
        ranks = np.diff(begin, append=devices.shape[1]).tolist()
        hosts = [self.nodes[home].host for home in homes.tolist()]
        return Cluster(tuple(map(Node, hosts, ranks, speeds, memories)), self.device_memory)

    def _smaller_mesh(self, parallel: schema.Parallel) -> tuple[int, int] | None:
        """Return the tp and pp with the largest product that form whole ranks of these devices, or None.

        They are at most the given ones, and the devices of a tp group are in one node. The new tp divides the given
        one, so it also divides the model's heads and columns if the given one does.
        """
        works = [
            (tp, pp)
            for tp in range(1, parallel.tp + 1)
            if parallel.tp % tp == 0 and all(node.devices % tp == 0 for node in self.nodes)
            for pp in range(1, min(parallel.pp, self.ranks) + 1)
            if self.ranks % (tp * pp) == 0 and (parallel.stages == "auto" or len(parallel.stages) == pp)
        ]
        return max(works, key=lambda mesh: (mesh[0] * mesh[1], mesh[0]), default=None)

    def _odd_node(self, group: int) -> str:
        """Name the first node that has another number of devices than most, if `group` would divide those of equal
        nodes; the end of a hint."""
        sizes = [node.devices for node in self.nodes]
        usual = max(set(sizes), key=sizes.count)
        if 2 * sizes.count(usual) <= len(sizes) or usual * len(sizes) % group:
            return ""
        odd = next(node for node in self.nodes if node.devices != usual)
        return f"; {odd.host} has {counted(odd.devices, 'device')}, most nodes have {usual}"

    def with_memory(self, usable: Callable[[int], int]) -> Cluster:
        """Return the cluster with the memory of each rank, in bytes, replaced by `usable(memory)`."""
        nodes = (node if node.memory is None else replace(node, memory=usable(node.memory)) for node in self.nodes)
        return Cluster(tuple(nodes), usable(self.device_memory))

    @property
    def ranks(self) -> int:
        """The number of ranks of all nodes."""
        return self._first_ranks[-1]

    @property
    def largest_node(self) -> int:
        """The number of ranks of the node with the most ranks."""
        return max(self._ranks_per_node)

    def place(self, rank: int) -> tuple[int, int]:
        """Return the node's index and the local rank in that node. Raises IndexError for a rank that does not exist."""
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank {rank} is out of range for {self.ranks} ranks")
        node = bisect_right(self._first_ranks, rank) - 1
        return node, rank - self._first_ranks[node]

    @cached_property
    def node_of(self) -> Ints:
        """The index of each rank's node, [ranks]."""
        return np.repeat(np.arange(len(self.nodes), dtype=np.int64), self._ranks_per_node)

    @cached_property
    def speed(self) -> Ints:
        """Each rank's speed in percent of full speed, [ranks]."""
        return np.repeat(np.array([node.speed for node in self.nodes], dtype=np.int64), self._ranks_per_node)

    @cached_property
    def memory(self) -> Ints:
        """Each rank's memory in bytes, [ranks]."""
        own = [self.device_memory if node.memory is None else node.memory for node in self.nodes]
        return np.repeat(np.array(own, dtype=np.int64), self._ranks_per_node)

    @property
    def _ranks_per_node(self) -> list[int]:
        return [node.devices for node in self.nodes]

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        """The first rank of each node, then the number of ranks."""
        return tuple(accumulate(self._ranks_per_node, initial=0))


def nodes_of(config: schema.Cluster) -> tuple[Node, ...]:
    """The nodes of a config: those of its hostfile if set, else `nodes` x `ranks_per_node`.

    Raises ConfigError for a hostfile that is missing, unreadable, empty or malformed; there is no fallback to this
    machine.
    """
    if config.hostfile is not None:
        return hostfile.read(config.hostfile)
    return _equal_nodes(config.nodes, config.ranks_per_node)


@lru_cache(maxsize=4)  # making tens of thousands of nodes is slow, and a command asks for them several times
def _equal_nodes(nodes: int, devices: int) -> tuple[Node, ...]:
    hosts = ["localhost"] if nodes == 1 else [f"node-{index}" for index in range(nodes)]
    return tuple(Node(host, devices) for host in hosts)
