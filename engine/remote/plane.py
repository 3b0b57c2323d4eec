"""The data plane of a run on Ray, as the agent of the first node describes it to the supervisor."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.readers import parse_line

# Ray's own variables. Processes that connect get them from the agent of their node.
ADDRESS, AUTH_MODE, TOKEN_PATH, TOKEN = "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"
NODE_ADDRESS = "BYTESCALE_RAY_NODE"  # the address of this node, `_node_ip_address` of ray.init
FILES = "BYTESCALE_RAY_FILES"  # a folder of this node that outlives a restart of its Ray; unset in a given cluster
START = "BYTESCALE_RAY_START"  # a random identifier of the start of a run


@dataclass(frozen=True)
class Plane:
    """What the supervisor must know. How to connect is in its environment: ADDRESS and the others above."""

    folder: str  # the run folder
    hosts: Sequence[Sequence[int]]  # the HDP ranks of each host, in the order of the nodes of the run

    def to_json(self) -> str:
        """Return the line that the supervisor reads from its standard input."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, line: str) -> Plane:
        """Make a Plane of that line."""
        return cls(**parse_line(line))


def host_resource(number: int) -> str:
    """Return the Ray resource that only host `number` of a run has. Agents start Ray with 1,000 of it."""
    return f"bytescale-host-{number}"


def namespace(folder: Path | str) -> str:
    """Return the Ray namespace of the actors of this start of a run: runs may share a cluster, and so may starts.

    Actors of an earlier start, which may have had other settings and hosts, have another one.
    """
    return f"bytescale-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}-{os.environ[START]}"


def of_same_run(one: str, other: str) -> bool:
    """Return whether two namespaces are those of starts of the same run."""
    return one.rpartition("-")[0] == other.rpartition("-")[0]
