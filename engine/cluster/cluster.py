"""The machine as nodes and ranks. All rank arithmetic is here: nobody else writes `rank // 8`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from engine.cluster.hostfile import Node, parse
from engine.config import schema
from engine.errors import ConfigError


@dataclass(frozen=True)
class Cluster:
    """Nodes in order; ranks are counted through them. `device_memory` is in bytes a rank."""

    nodes: tuple[Node, ...]
    device_memory: int

    @classmethod
    def of(cls, config: schema.Cluster) -> Cluster:
        """Return the cluster of a config: its hostfile's nodes if it names one, else `nodes` x `ranks_per_node`.

        Raises ConfigError for a hostfile that is missing, unreadable, empty or malformed.
        """
        if config.hostfile is not None:
            return cls(_read(config.hostfile), config.device_memory)
        nodes = tuple(Node(_host(index, config.nodes), config.ranks_per_node) for index in range(config.nodes))
        return cls(nodes, config.device_memory)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self._first[-1]

    def place(self, rank: int) -> tuple[int, int]:
        """Return the node's index and the rank's place in that node. Raises IndexError out of 0..ranks-1."""
        for index in range(len(self.nodes)):
            if rank in self.node_ranks(index):
                return index, rank - self._first[index]
        raise IndexError(f"rank {rank} is not one of {self.ranks} ranks")

    def node_ranks(self, node: int) -> range:
        """Return the ranks of a node."""
        return range(self._first[node], self._first[node + 1])

    @cached_property
    def _first(self) -> tuple[int, ...]:
        """Return the first rank of each node, and behind them the number of ranks."""
        return tuple(accumulate((node.slots for node in self.nodes), initial=0))


def _host(index: int, nodes: int) -> str:
    return "localhost" if nodes == 1 else f"node-{index}"


def _read(path: str) -> tuple[Node, ...]:
    """Return the nodes of a hostfile. A missing one is an error, never a silent fall back to this machine."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        message = f"the hostfile {path} cannot be read: {reason}"
        raise ConfigError(message, key="cluster.hostfile", hint="name a file of lines `HOST slots=N`") from error
    return parse(text, path)
