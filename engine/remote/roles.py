"""What actors do in their roles: one plans for all hosts, one on each host packs, constructs and serves.

```
 planning process of a node   build(cursor)                                         bridge.py
   host-0                       step(cursor) -> planner    plan, and the hosts that have its blocks
                                slices(ranges) -> host-0, host-1, ...
                                rank files of its ranks
   planner                      lengths(blocks), pack(block) -> host-0, host-1, ...
```
Answers are pure functions of the questions, and so are files; whoever asks again gets the same. Only the number of
loaders is set.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.config.load import read_resolved
from engine.data.blocks.blocks import BlockId, Range
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.served import Served, lengths_payload
from engine.data.blocks.texts import Texts
from engine.data.blocks.work import Cost
from engine.data.corpus import Reader
from engine.data.opening import open_run
from engine.data.rank_file import RankFiles
from engine.data.runtime import cuts
from engine.data.runtime.constructor import Constructor
from engine.data.runtime.events import QueueLog
from engine.data.runtime.local import name_of_host
from engine.data.runtime.planner import Sent, SentSets, StepPlanner, received_sets, received_step
from engine.data.runtime.scaler import Scaler, loader_bounds
from engine.data.steps import Cursor
from engine.job import Job
from engine.planner.make import plan_step
from engine.remote.actor import Role
from engine.remote.caller import Caller
from engine.remote.plane import Plane
from engine.remote.ray_blocks import RayBlocks
from engine.remote.slices import HostBlocks, read
from engine.remote.view import PLANNER, host_of, host_role
from engine.run.folder import RunFolder
from engine.simulator.timeline import simulate

_KEPT_STEPS = 4  # whose plans a planner keeps: hosts ask for the same step at different times
Owners = Mapping[BlockId, str]  # the host that has packed a block


class PlannedStep(NamedTuple):
    """A step, and which hosts have its blocks."""

    sent: Sent
    owners: Owners


class PlannedSets(NamedTuple):
    """The validation sets, and which hosts have their blocks."""

    sent: SentSets
    owners: Owners


@dataclass
class RunRoles:
    """The roles of a run. It is sent to actors, which warm it."""

    plane: Plane

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.plane.folder))

    @cached_property
    def job(self) -> Job:
        return Job(read_resolved(self.folder.resolved))

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """The least and the most loaders of all hosts together; see `loader_bounds`.

        The supervisor asks for them first, so actors get the same ones, whatever number of cores their hosts have.
        """
        data, hosts = self.job.config.data, len(self.plane.hosts)
        least, most = data.ray.loaders or loader_bounds(data, hosts)
        return max(least, hosts), max(most, hosts)

    @property
    def loaders(self) -> int:
        return -(-self.bounds[1] // len(self.plane.hosts))

    def warm(self) -> None:
        """Make the planner's settings, and plan once, which loads compiled code."""
        length = np.ones(1, dtype=np.int64)
        simulate(plan_step(length, self.job.settings), self.job.settings)

    def make(self, role: str, epoch: int, caller: Caller, scratch: Path) -> Role:
        """Make the object of a role. Raises errors of `open_run`, and OSError for `scratch`."""
        host = host_of(role)
        if host is None:
            return Planner(self.folder, self.job, caller, self.plane.hosts, self.bounds)
        return Host(self.folder, self.job, caller, role, self.plane.hosts[host], scratch / role, epoch, self.loaders)


class Planner:
    """Plans for all hosts, from lengths alone. Each gets the cut of the plan for its ranks, the first one the plan."""

    def __init__(
        self, folder: RunFolder, job: Job, caller: Caller, hosts: Sequence[Sequence[int]], bounds: tuple[int, int]
    ) -> None:
        """Take the HDP ranks of each host, and the least and the most loaders of all hosts together."""
        self._caller, self._hosts = caller, hosts
        least, most = bounds

        def make_blocks(texts: Mapping[str, Texts]) -> RayBlocks:
            self._blocks = RayBlocks(texts, caller, [*map(host_role, range(len(hosts)))], most)
            return self._blocks

        sources = open_run(folder, job.config, make_blocks)
        scaler = Scaler(self._blocks, least, most, folder) if least < most else None
        self._planner = StepPlanner(sources, job, self._blocks.packed, scaler)
        self._names = [corpus.name for corpus in self._planner.steps.corpora]
        self._queue = QueueLog(folder, self._blocks.queued)
        self._lock = threading.Lock()
        self._steps = dict[str, list[Sent]]()  # for each host
        self._sets = dict[int, list[PlannedSets]]()  # by the number of the order of documents, for each host
        self._planned = 0  # steps

    def step(self, cursor: Cursor, host: int) -> PlannedStep:
        """Return the step at a cursor for a host. It is planned once for all hosts."""
        key = json.dumps(cursor.to_json())
        with self._lock:
            if key not in self._steps:
                self._steps[key] = self._planner.step_of_hosts(cursor, self._hosts)
                self._planned += 1
                for old in list(self._steps)[:-_KEPT_STEPS]:
                    del self._steps[old]
            sent = self._steps[key][host]
        return PlannedStep(sent, self._owners([sent.sequences]))

    def validation(self, order: int, host: int) -> PlannedSets:
        """Return the validation sets for a host. They are planned once for all hosts."""
        with self._lock:
            if order not in self._sets:
                sets = self._planner.validation_of_hosts(order, self._hosts)
                # Their owners are kept with them: by the time that a host asks again, they are forgotten.
                self._sets[order] = [PlannedSets(sent, self._owners(sent.values())) for sent in sets]
            return self._sets[order][host]

    def state(self) -> dict[str, Any]:
        """Return what is worth seeing.

        Steps planned, bytes of lengths and tokens that came, blocks with a host, loaders, calls asked again, and late
        answers refused.
        """
        blocks = self._blocks
        found = {"received": blocks.received, "tokens": blocks.tokens, "blocks": len(blocks.owners)}
        found |= {"planned": self._planned, "loaders": blocks.loaders}
        return found | {"again": self._caller.asked_again, "refused": self._caller.refused}

    def close(self) -> None:
        self._planner.close()
        self._queue.close()

    def _owners(self, sequences: Iterable[bytes]) -> Owners:
        """Return the hosts of the blocks of texts of planned sequences."""
        tables = [cuts.from_bytes(one).table for one in sequences]
        places = {place for table in tables for place in zip(table.source.tolist(), table.block.tolist(), strict=True)}
        blocks = (BlockId(self._names[source], block) for source, block in places)
        return {block: self._blocks.owners[block] for block in blocks if block in self._blocks.owners}


class Packer:
    """Packs blocks with the loaders of a host, and serves them."""

    def __init__(self, blocks: LocalBlocks) -> None:
        """The blocks are closed with this object."""
        self._local, self._served = blocks, Served(blocks)
        self._packing, self._asking = dict[BlockId, None](), threading.Lock()

    def pack(self, block: BlockId) -> tuple[bytes, dict[str, Cost]]:
        """Let a loader pack a block; return its lengths, and what loaders have packed since the last answer."""
        with self._asking:
            self._packing[block] = None
            self._local.ask(self._packing)
        try:
            return lengths_payload({block: self._local.lengths(block)}), self._local.packed()
        finally:
            with self._asking:
                del self._packing[block]

    def resize(self, loaders: int) -> list[tuple[str, float]]:
        """Set the number of loaders; return what they are packing, as `Loaders.running`."""
        self._local.resize(loaders)
        return self._local.running()

    def lengths(self, blocks: Sequence[BlockId]) -> bytes:
        """Return the lengths of those of the blocks that are packed."""
        return self._served.lengths(blocks)

    def slices(self, wanted: Sequence[Range]) -> bytes:
        """Return the tokens of those of the ranges whose blocks are packed."""
        return self._served.slices(wanted)

    def read(self, wanted: Sequence[Range]) -> bytes:
        """Return the tokens of ranges, whose blocks are packed again if they must. Raises errors as Blocks.slices."""
        return read(self._local, wanted)

    def close(self) -> None:
        self._local.close()


class Host(Packer):
    """Also writes the rank files of the HDP ranks of its host."""

    def __init__(
        self,
        folder: RunFolder,
        job: Job,
        caller: Caller,
        role: str,
        ranks: Sequence[int],
        files: Path,
        epoch: int,
        loaders: int,
    ) -> None:
        """Each one has a folder of its own for rank files: a replaced actor may still write to its folder.

        The planner changes the number of `loaders`.
        """
        data = job.config.data
        files.mkdir(parents=True, exist_ok=True)
        self._caller, self._files = caller, files
        self._folder = Path(tempfile.mkdtemp(prefix=f"epoch-{epoch}-", dir=files))
        self._host = host_of(role)
        assert self._host is not None
        name = name_of_host(job, self._host)

        def make_blocks(texts: Mapping[str, Texts]) -> HostBlocks:
            local = LocalBlocks(texts, Loaders(loaders, data.spool) if texts else None, name)
            self._blocks = HostBlocks(local, caller, role)
            return self._blocks

        sources = open_run(folder, job.config, make_blocks)
        super().__init__(self._blocks.local)
        self._constructor = Constructor(Reader(sources.corpora, job.config.model.vocab), self._folder, ranks, epoch)
        self._lock, self._epoch = threading.Lock(), epoch
        self._first: int | None = None  # step whose files were written

    def build(self, cursor: Cursor) -> tuple[Sent, RankFiles]:
        """Write the rank files of the step at a cursor; return the step."""
        sent, owners = self._caller.call(PLANNER, "step", cursor, self._host)
        planned = received_step(sent)
        with self._lock:
            self._blocks.owners = owners
            step = planned.after.step
            files = self._constructor.build_step(step, planned.table, planned.plan)
            # When a step after the first one is requested, no rank opens files of earlier epochs any more: those of the
            # validation sets are mapped already. The epochs of those that replace this one are higher.
            self._first = step if self._first is None else self._first
            if step > self._first:
                for other in self._files.iterdir():
                    if int(other.name.split("-")[1]) < self._epoch:
                        shutil.rmtree(other, ignore_errors=True)
        return sent, files

    def build_sets(self, order: int) -> tuple[SentSets, dict[str, RankFiles]]:
        """Write the rank files of the validation sets; return the sets."""
        sent, owners = self._caller.call(PLANNER, "validation", order, self._host)
        with self._lock:
            self._blocks.owners = owners
            return sent, self._constructor.build_sets(received_sets(sent))

    def state(self) -> dict[str, Any]:
        """Return what is worth seeing: tokens that were read for its ranks, loaders, calls asked again and refused."""
        found = {"read": self._blocks.tokens, "loaders": self._local.loaders}
        return found | {"again": self._caller.asked_again, "refused": self._caller.refused}
