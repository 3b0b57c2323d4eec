"""The machine as nodes and ranks. All rank arithmetic is here: nobody else writes `rank // 8`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.cluster.hostfile import Node, parse
from engine.config import schema
from engine.config.units import counted
from engine.errors import ConfigError

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Cluster:
    """Nodes in order; ranks are counted through them. `device_memory` is in bytes a rank, where a node has no own.

    Beside processes the same object stands for HDP ranks, each of d_tp x d_pp devices (`of` with degrees).
    """

    nodes: tuple[Node, ...]
    device_memory: int

    @classmethod
    def of(cls, config: schema.Cluster, parallel: schema.Parallel | None = None) -> Cluster:
        """Return the cluster of a config: its hostfile's nodes if it names one, else `nodes` x `ranks_per_node`.

        With `parallel` its ranks are HDP ranks. Raises ConfigError for a hostfile that is missing, unreadable, empty or
        malformed, and for degrees that do not divide its devices or cut a rank's at the border of two nodes.
        """
        nodes = _read(config.hostfile) if config.hostfile is not None else _alike(config.nodes, config.ranks_per_node)
        cluster = cls(nodes, config.device_memory)
        return cluster if parallel is None else cluster._hdp(parallel.tp, parallel.pp)

    def _hdp(self, tp: int, pp: int) -> Cluster:
        """Return the HDP ranks. The d_tp devices of one are neighbours, and stages lie in other nodes if they can.

        So a ring, which is one stage's, sees slots / d_tp ranks in a node; one that spans nodes is a node of its own.
        The slowest of their devices, and the one of the least memory, say what the ranks of a node are.
        """
        if tp == pp == 1:
            return self
        if self.ranks % (tp * pp):
            message = f"parallel.tp x parallel.pp = {tp * pp} does not divide {counted(self.ranks, 'device')}"
            key = "parallel.tp" if self.ranks % tp else "parallel.pp"
            raise ConfigError(message, key=key, hint="choose degrees that divide them")
        devices = np.arange(self.ranks).reshape(pp, -1, tp)
        self._check_borders(devices.reshape(-1, tp))
        homes, begin = np.unique(self.node_of[devices[0, :, 0]], return_index=True)
        speeds, memories = (
            np.minimum.reduceat(each[devices].min(axis=(0, 2)), begin).tolist() for each in (self.speed, self.memory)
        )
        slots = np.diff(begin, append=devices.shape[1]).tolist()
        hosts = [self.nodes[home].host for home in homes.tolist()]
        nodes = map(Node, hosts, slots, speeds, memories)
        return Cluster(tuple(nodes), self.device_memory)

    def _check_borders(self, groups: Ints) -> None:
        """Refuse groups of d_tp devices, [groups, d_tp], that hold only parts of two nodes: costs know no such rank."""
        first, last = groups[:, 0], groups[:, -1]
        inside = self.node_of[first] == self.node_of[last]
        whole = np.isin(first, self._first) & np.isin(last + 1, self._first)
        cut = np.flatnonzero(~inside & ~whole)
        if len(cut):
            hosts = [self.nodes[self.node_of[end[cut[0]]]].host for end in (first, last)]
            message = f"parallel.tp={groups.shape[1]} puts devices of {hosts[0]} and of {hosts[1]} into one rank"
            hint = "choose a degree that divides the slots of each node"
            raise ConfigError(message, key="parallel.tp", hint=hint)

    def leaving(self, usable: Callable[[int], int]) -> Cluster:
        """Return the same ranks with what `usable` leaves of each one's memory."""
        nodes = (node if node.memory is None else replace(node, memory=usable(node.memory)) for node in self.nodes)
        return Cluster(tuple(nodes), usable(self.device_memory))

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self._first[-1]

    @property
    def largest_node(self) -> int:
        """Return the ranks of the node that has the most."""
        return max(self._slots)

    def place(self, rank: int) -> tuple[int, int]:
        """Return the node's index and the rank's place in that node. Raises IndexError out of 0..ranks-1."""
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank {rank} is not one of {self.ranks} ranks")
        node = bisect_right(self._first, rank) - 1
        return node, rank - self._first[node]

    @cached_property
    def node_of(self) -> Ints:
        """Return the node of each rank, [ranks]."""
        return np.repeat(np.arange(len(self.nodes), dtype=np.int64), self._slots)

    @cached_property
    def speed(self) -> Ints:
        """Return each rank's speed in percent, [ranks]."""
        return np.repeat(np.array([node.speed for node in self.nodes], dtype=np.int64), self._slots)

    @cached_property
    def memory(self) -> Ints:
        """Return each rank's memory in bytes, [ranks]."""
        own = [self.device_memory if node.memory is None else node.memory for node in self.nodes]
        return np.repeat(np.array(own, dtype=np.int64), self._slots)

    @property
    def _slots(self) -> list[int]:
        return [node.slots for node in self.nodes]

    @cached_property
    def _first(self) -> tuple[int, ...]:
        """Return the first rank of each node, and behind them the number of ranks."""
        return tuple(accumulate(self._slots, initial=0))


@lru_cache(maxsize=4)  # tens of thousands take a moment, and a command asks several times
def _alike(nodes: int, slots: int) -> tuple[Node, ...]:
    return tuple(Node(_host(index, nodes), slots) for index in range(nodes))


def _host(index: int, nodes: int) -> str:
    return "localhost" if nodes == 1 else f"node-{index}"


def _read(path: str) -> tuple[Node, ...]:
    """Return the nodes of a hostfile. A missing one is an error, never a silent fall back to this machine."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a mark of its encoding
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        message = f"the hostfile {path} cannot be read: {reason}"
        raise ConfigError(message, key="cluster.hostfile", hint="name a file of lines `HOST slots=N`") from error
    return parse(text, path)
