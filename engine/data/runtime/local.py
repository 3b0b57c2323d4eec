"""The local runtime: each node plans for itself in one process.

```
                  one data.cache                                several: each host has another
 packing          loaders of all hosts, each what it needs      loaders of the host that owns a block (peer_blocks.py)
 ranks read       their documents, from data.cache              the rank files that their planning process writes
```
The planning process plans a step, and writes its rank files, while the ranks run the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from engine.config.sources import source_configs
from engine.control.control import Control
from engine.data.block_files import read_placed
from engine.data.blocks.blocks import Blocks
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.peer_blocks import PeerBlocks
from engine.data.blocks.texts import Texts
from engine.data.corpus import Reader
from engine.data.inputs import RankInputs, rank_inputs
from engine.data.opening import open_run
from engine.data.rank_file import RankFiles
from engine.data.runtime.constructor import Constructor
from engine.data.runtime.hosts import Meeting, NodeHosts
from engine.data.runtime.node import NodeAnswers
from engine.data.runtime.planner import Sent, SentSets, StepPlanner, received_sets, received_step
from engine.data.runtime.runtime import Planned, PlannedSequences
from engine.data.runtime.scaler import Scaler, loader_bounds
from engine.data.steps import Cursor
from engine.job import Job
from engine.run.folder import RunFolder


def name_of_host(job: Job, node: int) -> str | None:
    """Return the name of the host of a node for errors of its documents; None if the run has no other."""
    return job.cluster.nodes[node].host if len(job.cluster.nodes) > 1 else None


class NodePlanner:
    """Answers the questions of ranks in the planning process of a node: plans, and the rank files of its ranks."""

    def __init__(self, planner: StepPlanner, constructor: Constructor | None = None) -> None:
        """Without a constructor there are no rank files: ranks read blocks themselves."""
        self.planner, self._constructor = planner, constructor

    @classmethod
    def of(cls, folder: RunFolder, job: Job, node: int, others: NodeHosts | None = None) -> NodePlanner:
        """Make it with loaders that pack the blocks of a run; `others` are the hosts with which it shares them.

        Unless `data.loaders` is set, their number changes with the work that there is.
        """
        data, host, made = job.config.data, name_of_host(job, node), list[LocalBlocks]()
        least, most = loader_bounds(data)

        def make_blocks(texts: Mapping[str, Texts]) -> Blocks:
            local = LocalBlocks(texts, Loaders(most, data.spool) if texts else None, host)
            made.append(local)
            return local if others is None else PeerBlocks(texts, local, others.hosts, read_placed(folder.blocks))

        sources, constructor = open_run(folder, job.config, make_blocks), None
        if others is not None:
            constructor = Constructor(Reader(sources.corpora, job.config.model.vocab), others.files, others.ranks)
        scaler = Scaler(made[0], least, most, folder, node) if least < most and made[0].loaders else None
        return cls(StepPlanner(sources, job, made[0].packed, scaler), constructor)

    def step(self, cursor: Cursor) -> tuple[Sent, RankFiles | None]:
        """Plan the step at a cursor, and write its rank files."""
        sent = self.planner.step(cursor)
        if self._constructor is None:
            return sent, None
        planned = received_step(sent)
        return sent, self._constructor.build_step(planned.after.step, planned.table, planned.plan)

    def validation(self, order: int) -> tuple[SentSets, dict[str, RankFiles] | None]:
        """Plan the validation set of each source, as `Steps.validation` does, and write its rank files."""
        sent = self.planner.validation(order)
        if self._constructor is None:
            return sent, None
        return sent, self._constructor.build_sets(received_sets(sent))

    def close(self) -> None:
        """End what packs ahead."""
        self.planner.close()


class LocalRuntime:
    """The DataRuntime of a rank."""

    def __init__(
        self, folder: RunFolder, job: Job, control: Control, sockets: Sequence[int] = (), first: bool = True
    ) -> None:
        """Open the documents of a run.

        `sockets` lead to ranks of the same node. The `first` rank of a node starts its planning process. Raises
        StorageError if `data.cache` cannot be used.
        """
        self._names = [*source_configs(job.config.data)]
        self._hdp_rank, (node, _) = job.mesh.place(control.rank).hdp, job.cluster.place(control.rank)
        self._meeting = Meeting(job, control, first)
        # Ranks read blocks themselves unless hosts share them.
        self._reader = None
        if not self._meeting.separate:
            self._reader = Reader(open_run(folder, job.config).corpora, job.config.model.vocab)
        make = partial(NodePlanner.of, folder, job, node, self._meeting.others)
        self._answers = NodeAnswers(make, sockets, first)

    def request(self, cursor: Cursor) -> None:
        self._answers.ask(NodePlanner.step, cursor)  # the planning process calls it on its NodePlanner

    def take(self) -> Planned:
        return received_step(*self._answers.answer())

    def validation(self, order: int) -> dict[str, PlannedSequences]:
        self._answers.ask(NodePlanner.validation, order)
        return received_sets(*self._answers.answer())

    def input_reader(self, planned: PlannedSequences) -> partial[RankInputs]:
        if self._reader is not None:
            return partial(rank_inputs, self._reader, planned.table)
        assert planned.files is not None
        file = planned.files.open(self._names, planned.table, planned.plan, self._hdp_rank)
        return partial(rank_inputs, file, planned.table)

    def close(self) -> None:
        self._answers.close()
        self._meeting.close()
