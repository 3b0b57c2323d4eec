"""Plans steps and validation sets: the sequences, their plan and its simulated times.

It runs in a process of the runtime. A plan is a pure function of lengths and settings, so nodes do not exchange plans.
They only compare digests (`Control.check_same`), to detect a node with a different plan. It imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from engine.config.schema import Config
from engine.data.blocks.loaders import Loaders, Work
from engine.data.corpus import TextCorpus, corpora_of
from engine.data.parts import LeftOut
from engine.data.quarantine import Unusable
from engine.data.runtime.runtime import Planned, PlannedSequences
from engine.data.steps import TOKEN_BYTES, Cursor, SequenceTable, Steps
from engine.data.workers import cores
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.run.folder import RunFolder
from engine.simulator.timeline import simulate, useful

_MOST_LOADERS = 8  # of a host, unless the config says more
_AHEAD_STEPS = 4  # whose blocks are packed ahead, if tokens have TOKEN_BYTES bytes of text

# Answers as they are sent: the plan in bytes, and the other fields of Planned.
Sent = tuple[SequenceTable, bytes, float, float, int, Cursor, list[Unusable], str | None]
SentSets = dict[str, tuple[SequenceTable, bytes]]


def received_step(sent: Sent) -> Planned:
    """Return the step that `StepPlanner.step` has sent."""
    table, buffer, balance, step_s, flops, after, unusable, ended = sent
    return Planned(table, StepPlan.from_bytes(buffer), balance, step_s, flops, after, unusable, ended)


def received_sets(sent: SentSets) -> dict[str, PlannedSequences]:
    """Return the validation sets that `StepPlanner.validation` has sent."""
    return {name: PlannedSequences(table, StepPlan.from_bytes(buffer)) for name, (table, buffer) in sent.items()}


class StepPlanner:
    """Answers the questions of ranks in the planning process."""

    def __init__(self, folder: RunFolder, config: Config, settings: PlanSettings) -> None:
        self.settings = settings
        self.steps = Steps(corpora_of(folder, config), config)
        self.texts = {corpus.name: corpus for corpus in self.steps.corpora if isinstance(corpus, TextCorpus)}
        self.ahead = _AHEAD_STEPS * TOKEN_BYTES * config.batch_tokens
        count = config.data.loaders or min(_MOST_LOADERS, max(1, cores() // 2))
        self.loaders = Loaders(count, config.data.spool) if self.texts else None
        self.unusable = list[Unusable]()  # of blocks that have been opened since the last step
        for corpus in self.texts.values():
            if self.loaders is not None:
                corpus.wait = self.loaders.wait
            corpus.opened = partial(self.note, corpus.name)

    def note(self, source: str, block: int, left_out: LeftOut) -> None:
        """Note which documents of a block cannot be used."""
        self.unusable += (Unusable(source, block, *one) for one in left_out.broken)

    def ask(self, blocks: Iterable[tuple[str, int]]) -> None:
        """Let the loaders pack blocks of sources of texts."""
        if self.loaders is not None:
            self.loaders.ask(self._works(blocks))

    def _works(self, blocks: Iterable[tuple[str, int]]) -> Iterator[Work]:
        texts = ((self.texts[name], block) for name, block in blocks if name in self.texts)
        return (Work(corpus.tokens, corpus.folder, corpus.block_list[block]) for corpus, block in texts)

    def step(self, cursor: Cursor) -> Sent:
        """Plan the step at a cursor. It is simulated here too, because that takes as long as planning."""
        self.ask(self.steps.upcoming(cursor, self.ahead))
        found = self.steps.next(cursor)
        assert found is not None, "the run has ended"
        table, after = found
        plan = plan_step(table.length, self.settings)
        ended = self.steps.ended(after)  # may open the next window, so before `unusable` is taken
        unusable, self.unusable = self.unusable, []
        makespan = simulate(plan, self.settings).makespan
        balance = useful(plan.sequence_lengths, self.settings) / makespan
        step_s = self.settings.costs.seconds(makespan + self.settings.costs.step)
        flops = self.settings.costs.flops(plan.sequence_lengths)
        return table, plan.to_bytes(), balance, step_s, flops, after, unusable, ended

    def validation(self) -> SentSets:
        """Plan the validation set of each source."""
        validating = list(self.steps.validating())
        self.ask(validating)
        tables = self.steps.validation()
        if self.loaders is not None:  # they are read again and again
            self.loaders.keep(self._works(validating))
        return {name: (table, plan_step(table.length, self.settings).to_bytes()) for name, table in tables.items()}

    def close(self) -> None:
        """End the loaders."""
        if self.loaders is not None:
            self.loaders.close()
