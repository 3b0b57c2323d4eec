"""The data plane of a run of 2 hosts with 4 ranks each, on this machine, and what the local runtime gives its ranks."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import socketpair
from typing import Any

import numpy as np
import psutil
import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.control.control import Control
from engine.data.corpus import Reader
from engine.data.inputs import RankInputs, rank_inputs
from engine.data.overview import Corpora
from engine.data.runtime.runtime import Planned, PlannedSequences
from engine.data.sequences import SequenceTable
from engine.data.sources import jsonl
from engine.data.steps import Cursor
from engine.job import Job
from engine.launch.prepare import write_facts
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.remote import bridge as bridges
from engine.remote.bridge import Bridge, RayRuntime
from engine.remote.plane import NODE_ADDRESS, Plane
from engine.remote.roles import RunRoles
from engine.remote.view import View
from engine.run.folder import RunFolder
from tests.remote.cluster import ADDRESSES, HOSTS, RANKS

DEADLINE_S = 2.0
_TEXTS = 6000


def make_config(folder: Path, patch: pytest.MonkeyPatch, *more: str) -> Config:
    """A config of texts and of rows with masks, of 1/16 of a capacity to eight of them; many blocks of each.

    There are more texts than a test needs, so that loaders have blocks to pack.
    """
    patch.setattr(jsonl, "_BLOCK_BYTES", 20_000)
    drawn = random.Random(0)
    lengths = [drawn.choice([30, 400, 500, 900, 1900, 4000]) for _ in range(_TEXTS)]
    texts = ["{" if number % 50 == 7 else json.dumps({"text": "x" * length}) for number, length in enumerate(lengths)]
    rows = list[str]()
    for length in lengths[:60]:
        mask = [int(at % 100 > 40) for at in range(length)]
        rows.append(json.dumps({"ids": drawn.choices(range(256), k=length), "loss_mask": mask}))
    (folder / "texts.jsonl").write_text("\n".join(texts))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    sources = [
        f"data.sources.texts.path={folder / 'texts.jsonl'}",
        *(f"data.sources.rows.path={folder / 'rows.jsonl'}", "data.sources.rows.field=ids"),
        *(
            "data.mix={texts: 3, rows: 1}",
            "data.quarantine_after=2",
            "data.validation_share=0.1",
            "data.ray.loaders=[2,4]",
        ),
    ]
    sizes = ["context=4096", "capacity=512", "batch_tokens=8192", "data.validation_tokens=2000"]
    cluster = [f"cluster.nodes={HOSTS}", f"cluster.ranks_per_node={RANKS}", "data.runtime=ray"]
    cluster += [f"data.ray.deadline={DEADLINE_S}"]
    return load(["recipe=quickstart", "data=jsonl", *sources, *sizes, *cluster, *more])


def prepare(root: Path, config: Config) -> RunFolder:
    """Make a run folder as the launcher does for documents that it does not count."""
    folder = RunFolder(root)
    folder.logs.mkdir(parents=True)
    corpora = Corpora(config)
    corpora.are_few = False  # else it would count them
    write_facts(folder, config, corpora, 0)
    return folder


class OwnBridge(Bridge):
    """The bridge of a host. Its environment is that of the test."""

    def __init__(self, folder: RunFolder, host: int) -> None:
        os.environ[NODE_ADDRESS] = ADDRESSES[host]
        super().__init__(folder, host)


@dataclass
class Trio:
    """The runtimes of all ranks, in this process, with a planning process for each host."""

    ranks: list[RayRuntime]

    def ask(self, question: Any, *arguments: Any) -> Any:
        """Call a function with the bridge of the first host, in its planning process."""
        self.ranks[0]._answers.ask(question, *arguments)
        assert self.ranks[0]._answers.process is not None
        done, found = self.ranks[0]._answers.process.answer()
        if not done:
            raise found
        return found

    def request(self, cursor: Cursor) -> None:
        for rank in self.ranks:
            rank.request(cursor)

    def take(self) -> list[Planned]:
        return [rank.take() for rank in self.ranks]

    def validation(self, order: int) -> list[dict[str, PlannedSequences]]:
        return [rank.validation(order) for rank in self.ranks]

    def view(self) -> View:
        found: View = self.ask(view)
        return found

    def actors(self) -> dict[str, int]:
        """The processes of all actors that answer, also those without a role, by name."""
        found: dict[str, int] = self.ask(actors)
        return found

    def pid(self, role: str) -> int:
        """The process that has a role; of `loader`, one of host 0."""
        if role != "loader":
            return self.view().members[role].process.pid
        return self.loaders()[0]

    def loaders(self) -> list[int]:
        """The loaders of host 0. One that has died is replaced when it is needed."""
        found = list[int]()
        for one in psutil.Process(self.pid("host-0")).children():
            with suppress(psutil.NoSuchProcess):
                if "spawn_main" in " ".join(one.cmdline()) and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one.pid)
        return found


def state(bridge: Bridge, role: str) -> dict[str, Any]:
    found: dict[str, Any] = bridge._caller.call(role, "state")
    return found


def view(bridge: Bridge) -> View:
    bridge._caller.look()
    return bridge._caller._view


def actors(bridge: Bridge) -> dict[str, int]:
    from engine.remote.cluster import RayFleet

    fleet, found = RayFleet(bridge._caller._wire._namespace, RunRoles(Plane("", []))), dict[str, int]()  # type: ignore[attr-defined]
    for name, answer in {name: fleet.beat(name) for name in fleet.find()}.items():
        with suppress(Exception):
            found[name] = answer.result(1).process.pid
    return found


@contextmanager
def runtimes(folder: RunFolder, job: Job) -> Iterator[Trio]:
    """Open the runtime of each rank."""
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(bridges, "Bridge", OwnBridge)
        ranks = list[RayRuntime]()
        for host in range(HOSTS):
            pairs = [[end.detach() for end in socketpair()] for _ in range(RANKS - 1)]
            sockets: list[Sequence[int]] = [[mine for mine, _ in pairs], *([theirs] for _, theirs in pairs)]
            for local in range(RANKS):
                control = Control(host * RANKS + local)
                runtime = RayRuntime(folder, job, control, sockets[local], local == 0)
                ranks.append(stack.enter_context(closing(runtime)))
        yield Trio(ranks)


class Reference:
    """What the local runtime gives, computed in this process from a cache of its own."""

    def __init__(self, config: Config) -> None:
        corpora = Corpora(config)
        self.steps, self.job = corpora.steps, Job(config)
        self.reader = Reader(self.steps.corpora, config.model.vocab)
        self.tokens, self.rings = 0, set[int]()  # of what was compared; tokens of each HDP rank of a host once

    def next(self, cursor: Cursor) -> tuple[SequenceTable, StepPlan, Cursor]:
        found = self.steps.next(cursor)
        assert found is not None
        table, after = found
        return table, plan_step(table.length, self.job.settings), after

    def differing(self, trio: Trio, found: Sequence[PlannedSequences], table: SequenceTable, plan: StepPlan) -> int:
        """Return how many arrays of all ranks differ: rows of the table, and inputs of all micro-batches."""
        bad = 0
        for rank, (runtime, planned) in enumerate(zip(trio.ranks, found, strict=True)):
            bad += planned.plan.digest != plan.digest
            bad += planned.loss_tokens != table.loss_tokens.sum()
            self.rings |= set(plan.degrees.tolist())
            read, hdp = runtime.input_reader(planned), self.job.mesh.place(rank).hdp
            first = all(self.job.mesh.place(other).hdp != hdp for other in range(rank // RANKS * RANKS, rank))
            # All but the first host have a cut, whose sequences have other numbers.
            for micro, own in zip(plan.of_rank(hdp), planned.plan.of_rank(hdp), strict=True):
                expected = rank_inputs(self.reader, table, micro)
                bad += different(read(own), expected)
                numbers, own_numbers = ([shard.sequence for shard in one.shards] for one in (micro, own))
                for name in ("source", "block", "document", "start", "length", "loss_tokens", "hash"):
                    bad += not np.array_equal(getattr(planned.table, name)[own_numbers], getattr(table, name)[numbers])
                self.tokens += len(expected.tokens) if micro.shards and first else 0
        return bad


def different(one: RankInputs, other: RankInputs) -> int:
    """Return how many of the three arrays differ."""
    names = ("tokens", "labels", "positions")
    return sum(not np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
