"""Plans steps and validation sets: the sequences, their plan and its simulated times.

It runs in a process of the runtime, reads no tokens and imports no torch. A plan is a pure function of lengths and
settings, so nodes do not exchange plans. They only compare digests (`Control.check_same`), to detect a node with a
different plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.data.opening import Sources
from engine.data.quarantine import Unusable
from engine.data.runtime.constructor import RankFiles
from engine.data.runtime.runtime import Planned, PlannedSequences
from engine.data.steps import AHEAD_STEPS, Cursor, SequenceTable, Steps
from engine.job import Job
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.simulator.timeline import simulate, useful

# Answers in serialised form: the plan in bytes, and the other fields of Planned.
Sent = tuple[SequenceTable, bytes, float, float, int, Cursor, list[Unusable], str | None]
SentSets = dict[str, tuple[SequenceTable, bytes]]


def received_step(sent: Sent, files: RankFiles | None = None) -> Planned:
    """Return the step that `StepPlanner.step` has sent, with its rank files."""
    table, buffer, balance, step_s, flops, after, unusable, ended = sent
    return Planned(table, StepPlan.from_bytes(buffer), balance, step_s, flops, after, unusable, ended, files=files)


def received_sets(sent: SentSets, files: Mapping[str, RankFiles] | None = None) -> dict[str, PlannedSequences]:
    """Return the validation sets that `StepPlanner.validation` has sent, with their rank files."""
    return {
        name: PlannedSequences(table, StepPlan.from_bytes(buffer), files=None if files is None else files[name])
        for name, (table, buffer) in sent.items()
    }


class StepPlanner:
    """Answers the questions of ranks in the planning process."""

    def __init__(self, sources: Sources, job: Job) -> None:
        self.settings, self.blocks = job.settings, sources.blocks
        self.steps = Steps(sources.corpora, job.config)
        self.ahead = AHEAD_STEPS * job.config.batch_tokens

    def step(self, cursor: Cursor) -> Sent:
        """Plan the step at a cursor. It is simulated here too, because that takes as long as planning."""
        self.blocks.ask(self.steps.upcoming(cursor, self.ahead))
        found = self.steps.next(cursor)
        assert found is not None, "the run has ended"
        table, after = found
        plan = plan_step(table.length, self.settings)
        ended = self.steps.ended(after)  # may open the next window, so before `unusable` is taken
        unusable, self.steps.unusable = self.steps.unusable, []
        makespan = simulate(plan, self.settings).makespan
        balance = useful(plan.sequence_lengths, self.settings) / makespan
        step_s = self.settings.costs.seconds(makespan + self.settings.costs.step)
        flops = self.settings.costs.flops(plan.sequence_lengths)
        return table, plan.to_bytes(), balance, step_s, flops, after, unusable, ended

    def validation(self, order: int) -> SentSets:
        """Plan the validation set of each source, as `Steps.validation` does."""
        validating = list(self.steps.validating(order))
        self.blocks.ask(validating)
        tables = self.steps.validation(order)
        self.blocks.keep(validating)
        return {name: (table, plan_step(table.length, self.settings).to_bytes()) for name, table in tables.items()}

    def close(self) -> None:
        """End what packs ahead."""
        self.blocks.close()
