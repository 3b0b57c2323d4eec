"""Plans steps and validation sets: the sequences, their plan and its simulated times.

It runs in a process of the runtime, reads no tokens and imports no torch. A plan is a pure function of lengths and
settings, so nodes that plan for themselves do not exchange plans. They only compare digests (`Control.check_same`), to
detect a node with a different plan. A planner for all hosts sends each the cut of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from engine.data.blocks.blocks import BlockId
from engine.data.blocks.work import Cost
from engine.data.opening import Sources
from engine.data.quarantine import Unusable
from engine.data.rank_file import RankFiles
from engine.data.runtime import cuts
from engine.data.runtime.runtime import Planned, PlannedSequences
from engine.data.runtime.scaler import Scaler
from engine.data.sequences import SequenceTable
from engine.data.steps import Cursor, Steps
from engine.job import Job
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.simulator.timeline import simulate, useful

Hosts = Sequence[Sequence[int]]


class Sent(NamedTuple):
    """A planned step in serialised form: the sequences with their plan (cuts.py), and the other fields of Planned."""

    sequences: bytes
    balance: float
    step_s: float
    flops: int
    after: Cursor
    unusable: list[Unusable]
    dropped: dict[BlockId, int]
    ended: str | None
    packed: dict[str, Cost]


SentSets = dict[str, bytes]


def received_step(sent: Sent, files: RankFiles | None = None) -> Planned:
    """Return the step that a StepPlanner has sent, with its rank files."""
    others = sent._asdict()
    found = cuts.from_bytes(others.pop("sequences"))
    return Planned(found.table, found.plan, found.loss_tokens, **others, files=files)


def received_sets(sent: SentSets, files: Mapping[str, RankFiles] | None = None) -> dict[str, PlannedSequences]:
    """Return the validation sets that a StepPlanner has sent, with their rank files."""
    found = {name: cuts.from_bytes(buffer) for name, buffer in sent.items()}
    return {name: replace(one, files=files[name]) for name, one in found.items()} if files is not None else found


class StepPlanner:
    """Answers the questions of ranks in the planning process."""

    def __init__(
        self,
        sources: Sources,
        job: Job,
        packed: Callable[[], dict[str, Cost]] = dict,
        scaler: Scaler | None = None,
    ) -> None:
        """`packed` returns what loaders have packed since it was called last; it goes into the metrics.

        Without a scaler the number of loaders does not change.
        """
        self.settings, self.blocks, self._packed, self._scaler = job.settings, sources.blocks, packed, scaler
        self.steps = Steps(sources.corpora, job.config)

    def step(self, cursor: Cursor) -> Sent:
        """Plan the step at a cursor."""
        table, plan, sent = self._planned(cursor)
        return sent._replace(sequences=cuts.to_bytes(table, plan))

    def step_of_hosts(self, cursor: Cursor, hosts: Hosts) -> list[Sent]:
        """Plan the step at a cursor for several hosts.

        `hosts` are the HDP ranks of each; the first one has rank 0 and gets the whole plan, the others their cuts.
        """
        table, plan, sent = self._planned(cursor)
        return [sent._replace(sequences=buffer) for buffer in _of_hosts(table, plan, hosts)]

    def validation(self, order: int) -> SentSets:
        """Plan the validation set of each source, as `Steps.validation` does."""
        return {name: cuts.to_bytes(table, plan) for name, (table, plan) in self._validation(order).items()}

    def validation_of_hosts(self, order: int, hosts: Hosts) -> list[SentSets]:
        """Plan the validation set of each source for several hosts, as `step_of_hosts`."""
        sets = {name: _of_hosts(table, plan, hosts) for name, (table, plan) in self._validation(order).items()}
        return [{name: buffers[host] for name, buffers in sets.items()} for host in range(len(hosts))]

    def _planned(self, cursor: Cursor) -> tuple[SequenceTable, StepPlan, Sent]:
        """Plan the step at a cursor. It is simulated here too, because that takes as long as planning."""
        windows = list(self.steps.windows_ahead(cursor))
        self.blocks.ask(block for window in windows for block in window.blocks)
        if self._scaler is not None:
            self._scaler.step(self.steps, cursor, windows)
        found = self.steps.next(cursor)
        assert found is not None, "the run has ended"
        table, after = found
        plan = plan_step(table.length, self.settings)
        ended = self.steps.ended(after)  # may open the next window, so before `unusable` is taken
        unusable, self.steps.unusable = self.steps.unusable, []
        dropped, self.steps.dropped = self.steps.dropped, {}
        line, costs = simulate(plan, self.settings), self.settings.costs
        balance = useful(plan.sequence_lengths, self.settings) / line.makespan
        step_s = costs.seconds(line.step_ns(costs))
        flops = self.settings.costs.flops(plan.sequence_lengths)
        packed = self._packed()
        if self._scaler is not None:
            self._scaler.packed(packed)
        return table, plan, Sent(b"", balance, step_s, flops, after, unusable, dropped, ended, packed)

    def _validation(self, order: int) -> dict[str, tuple[SequenceTable, StepPlan]]:
        validating = list(self.steps.validating(order))
        self.blocks.ask(validating)
        tables = self.steps.validation(order)
        self.blocks.keep(validating)
        return {name: (table, plan_step(table.length, self.settings)) for name, table in tables.items()}

    def close(self) -> None:
        """End what packs ahead."""
        self.blocks.close()


def _of_hosts(table: SequenceTable, plan: StepPlan, hosts: Hosts) -> list[bytes]:
    """Return what each host gets: the first one writes the ledger and the trace, for which it needs the whole plan."""
    return [cuts.to_bytes(table, plan), *cuts.cuts_of(table, plan, hosts[1:])]
