"""The data runtime on Ray: the planning process of a node asks the host actor of the node, ranks map its rank files.

```
 ranks    RayRuntime       ask and get answers over NODE_SOCKETS, as with the local runtime; no Ray
 bridge   Bridge           in the planning process of the node; connects to Ray
 actors   host-N, planner  roles.py
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from engine.config.sources import source_configs
from engine.control.control import Control
from engine.data.inputs import RankInputs, rank_inputs
from engine.data.rank_file import RankFile, RankFiles
from engine.data.runtime.node import NodeAnswers
from engine.data.runtime.planner import Sent, SentSets, received_sets, received_step
from engine.data.runtime.runtime import Planned, PlannedSequences
from engine.data.steps import Cursor
from engine.job import Job
from engine.remote.plane import namespace
from engine.remote.view import host_role
from engine.run.folder import RunFolder


class Bridge:
    """The answers of the host actor of a node, in the planning process of the node."""

    def __init__(self, folder: RunFolder, host: int) -> None:
        """Connect to Ray. Raises PreflightError as `connect`."""
        from engine.remote import cluster  # imports ray, which ranks must not

        cluster.connect(namespace(folder.root))
        cluster.end_with_node()  # another process gets the question then
        self._caller, self._role = cluster.open_caller(namespace(folder.root)), host_role(host)

    def step(self, cursor: Cursor) -> tuple[Sent, RankFiles]:
        """Let the host write the rank files of the step at a cursor; return both."""
        found: tuple[Sent, RankFiles] = self._caller.call(self._role, "build", cursor)
        return found

    def validation(self, order: int) -> tuple[SentSets, dict[str, RankFiles]]:
        """Let the host write the rank files of the validation sets; return both."""
        found: tuple[SentSets, dict[str, RankFiles]] = self._caller.call(self._role, "build_sets", order)
        return found

    def close(self) -> None:
        """Stop calling."""
        self._caller.close()


class RayRuntime:
    """The DataRuntime of a rank."""

    def __init__(
        self, folder: RunFolder, job: Job, control: Control, sockets: Sequence[int] = (), first: bool = True
    ) -> None:
        """`sockets` lead to ranks of the same node. The `first` rank of a node starts its planning process."""
        self._rank, self._names = job.mesh.place(control.rank).hdp, list(source_configs(job.config.data))
        host, _ = job.cluster.place(control.rank)
        self._mapped: Mapping[RankFiles | None, RankFile] = {}  # of the validation sets
        self._answers = NodeAnswers(partial(Bridge, folder, host), sockets, first)

    def request(self, cursor: Cursor) -> None:
        self._answers.ask(Bridge.step, cursor)

    def take(self) -> Planned:
        return received_step(*self._answers.answer())

    def validation(self, order: int) -> dict[str, PlannedSequences]:
        self._answers.ask(Bridge.validation, order)
        found = received_sets(*self._answers.answer())
        # They are read again and again, and whoever replaces the host actor removes its files; mapped ones stay.
        self._mapped = {planned.files: self._open(planned) for planned in found.values()}
        return found

    def input_reader(self, planned: PlannedSequences) -> partial[RankInputs]:
        file = self._mapped.get(planned.files) or self._open(planned)
        return partial(rank_inputs, file, planned.table)

    def _open(self, planned: PlannedSequences) -> RankFile:
        assert planned.files is not None
        return planned.files.open(self._names, planned.table, planned.plan, self._rank)

    def close(self) -> None:
        self._answers.close()
