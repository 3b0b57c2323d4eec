"""The interface of a rank to the data of its run: the plan of each step, the validation sets, the inputs of
micro-batches.

```
 training loop     DataRuntime     request, take, validation, input_reader, close     runtime.py
 planning          StepPlanner     the sequences of a step, their plan, its times     planner.py
 documents         Blocks          lengths and slices of blocks of documents          blocks/blocks.py
```
A runtime decides which processes plan, pack and read. Its results are pure functions of documents, config and cursor,
so losses and the ledger are the same with every runtime. `data.runtime` names one of RUNTIMES (runtimes.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engine.data.blocks.blocks import BlockId
from engine.data.blocks.work import Cost
from engine.data.inputs import RankInputs
from engine.data.quarantine import Unusable
from engine.data.rank_file import RankFiles
from engine.data.sequences import SequenceTable
from engine.data.steps import Cursor
from engine.planner.plan.step_plan import MicroBatch, RankPlan, StepPlan


@dataclass(frozen=True, eq=False)
class PlannedSequences:
    """Some sequences, and the plan that runs them: a step, or a validation set.

    A rank may have a cut of both for the ranks of its host; the host of rank 0, which writes the ledger, has the whole.
    `files` are those with the tokens of the ranks of this host; None if ranks read blocks themselves.
    """

    table: SequenceTable  # in a cut, of its sequences
    plan: RankPlan
    loss_tokens: int  # labels that are not ignored, of all sequences
    files: RankFiles | None = field(default=None, kw_only=True)

    @property
    def whole(self) -> StepPlan:
        """The plan of all ranks, on the host of rank 0."""
        assert isinstance(self.plan, StepPlan), "this host has a cut"
        return self.plan


@dataclass(frozen=True, eq=False)
class Planned(PlannedSequences):
    """A planned step, with the simulated balance of the plan, and the cursor of the next step.

    `step_s` is the simulated time of the step, in seconds on the planned hardware; `flops` are its model FLOPs.
    `unusable` are documents left out of blocks first opened for this step; after a resume some may be listed already.
    `dropped` are how many documents, and pieces of documents, transforms left out of blocks opened for this step.
    `packed` is what loaders of this host have packed since the last step, by source.
    `ended` is the reason if there is no step after this one, as in `Steps.ended`.
    """

    balance: float
    step_s: float
    flops: int
    after: Cursor
    unusable: list[Unusable]
    dropped: dict[BlockId, int]
    ended: str | None
    packed: dict[str, Cost]


class DataRuntime(Protocol):
    """The data of a run, as one rank sees it. All ranks of a node must call the same methods in the same order."""

    def request(self, cursor: Cursor) -> None:
        """Start planning the step at `cursor`, which must exist (`Steps.ended`). Returns at once."""
        ...

    def take(self) -> Planned:
        """Wait for the requested plan and return it. Raises any error of planning, on all ranks of the node.

        Raises BytescaleError if planning fails repeatedly, ConnectionError if another rank of the node has ended.
        """
        ...

    def validation(self, order: int) -> dict[str, PlannedSequences]:
        """Return the validation set of each source that has one, in a run with the order of documents `Cursor.order`.

        Raises errors as `take` does.
        """
        ...

    def input_reader(self, planned: PlannedSequences) -> Callable[[MicroBatch], RankInputs]:
        """Return a function that reads the inputs of a micro-batch of `planned`, in any thread.

        That raises DataError and StorageError if documents cannot be read, or have changed since they were planned.
        """
        ...

    def close(self) -> None:
        """End the processes of the runtime that this rank has started."""
        ...
