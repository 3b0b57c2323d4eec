"""How the planning processes of several hosts find each other, if their hosts do not share `data.cache`.

```
 all ranks         identity of data.cache ------------> equal on all: nothing more is done
 first of a node   a port, and a folder for rank files
                   {identity, address, port} -- key -->  those of all nodes
```
Addresses and the secret come from the agent, keys go through the agents (`engine/control/keys.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.config.sources import source_configs
from engine.control.control import Control
from engine.control.sockets import reserved
from engine.data.blocks.peers import Hosts
from engine.data.cache import RANKS, cache_folder, identity_of
from engine.data.parts import unwritable
from engine.folders import drafting, opened, remove_drafts
from engine.job import Job
from engine.readers import parse_line

_KEY = "data/host-{}"  # of a node


@dataclass(frozen=True)
class NodeHosts:
    """What the planning process of a node gets if hosts share blocks."""

    hosts: Hosts
    files: Path  # the folder for the rank files of this node
    ranks: Sequence[int]  # its HDP ranks


class Meeting:
    """The hosts of a run, as one rank sees them. All ranks must make one together.

    `separate` is whether hosts have separate caches; `others` is for the planning process that the first rank of a node
    then starts. The first rank also removes rank files that a run which was killed has left.
    """

    def __init__(self, job: Job, control: Control, first: bool) -> None:
        """Find the hosts. Raises StorageError if `data.cache` cannot be used."""
        self.separate, self.others = False, None
        self._stack = ExitStack()
        cache, data = cache_folder(job.config.data), job.config.data
        if all(one.format == "tokens" for one in source_configs(data).values()):
            return
        try:
            if first:
                with suppress(FileNotFoundError), opened(cache) as folder:
                    remove_drafts(folder, RANKS)
            if len(job.cluster.nodes) == 1:
                return
            identity = identity_of(cache)
            self.separate = not control.is_same(identity)
            if self.separate and first:
                self.others = self._meet(job, control, identity, cache)
        except OSError as error:
            raise unwritable(error, cache) from error

    def _meet(self, job: Job, control: Control, identity: str, cache: Path) -> NodeHosts:
        """Tell the other nodes where this one listens, and return where they do."""
        meet, (node, _) = control.meeting(), job.cluster.place(control.rank)
        # It stays bound, also while the planning process is replaced, so that no other program gets the port.
        port = int(self._stack.enter_context(reserved(meet.address)).getsockname()[1])
        control.ask("set", _KEY.format(node), json.dumps([identity, meet.address, port]))
        keys = [_KEY.format(number) for number in range(len(job.cluster.nodes))]
        found = dict[str, list[tuple[str, int]]]()
        for value in control.ask("get", keys):
            other, *place = parse_line(value)
            found.setdefault(other, []).append((str(place[0]), int(place[1])))
        del found[identity]  # hosts that share this cache have the same blocks
        others = {other: places[node % len(places)] for other, places in found.items()}
        hosts = Hosts(identity, meet.address, port, bytes.fromhex(meet.secret), others)
        folder = self._stack.enter_context(opened(cache))
        draft = self._stack.enter_context(drafting(cache / RANKS, folder, cleans=False))
        draft.path  # noqa: B018 - makes the folder
        ranks = {job.mesh.place(rank).hdp for rank in np.flatnonzero(job.cluster.node_of == node).tolist()}
        return NodeHosts(hosts, draft.place / RANKS, sorted(ranks))

    def close(self) -> None:
        """Remove the rank files, and give up the port."""
        self._stack.close()
