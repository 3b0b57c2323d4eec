"""Saves the plan and the measured times of one step, which the report draws."""

from __future__ import annotations

from contextlib import suppress

from engine.control.control import Control
from engine.errors import DataError
from engine.files import write_durably, write_json
from engine.parallel.groups import Groups
from engine.planner.plan.step_plan import RankPlan, StepPlan
from engine.readers import GIB, read_bytes
from engine.report.boxes import Span, shown_in_run
from engine.run.folder import RunFolder
from engine.trainer.step import StepTimes


class Trace:
    """Writes one step of a run for the report: the one with the largest ring, preferably with unsplit sequences too.

    If a later step is as good, it replaces the written one only when a checkpoint is due, because writing costs four
    fsyncs.
    """

    def __init__(self, folder: RunFolder, groups: Groups) -> None:
        self._folder, self._groups = folder, groups
        self._shown = (0, False)  # of the written step: the largest degree, and whether it has unsplit sequences

    def resume(self, control: Control) -> None:
        """Compare later steps with the one that the run wrote before it was resumed. All ranks must call it."""
        shown = 0, False
        if self._groups.rank == 0:
            # None is written, or it is damaged or of another version: a later step replaces it.
            with suppress(OSError, DataError, ValueError, KeyError, TypeError):
                shown = _shows(StepPlan.from_bytes(read_bytes(self._folder.plan, GIB)))
        degree, has_unsplit = control.largest(*shown)
        self._shown = int(degree), bool(has_unsplit)

    def record(self, step: int, plan: RankPlan, times: StepTimes, checkpoint_due: bool) -> None:
        """Write the step if it is better for the report than the written one.

        All ranks must call it after every step. They all decide alike, because the decision depends only on the plan.
        """
        shows = _shows(plan)
        if shows < self._shown or (shows == self._shown and not checkpoint_due):
            return
        self._shown = shows
        # The times of the HDP ranks that the report draws, on all stages: the devices of a tp group have the same.
        groups, mine = self._groups, None
        place = groups.mesh.place(groups.rank)
        if place.tp == 0 and place.hdp in shown_in_run(plan):
            mine = [Span(place.hdp, *span, stage=place.pp) for span in times.spans()]
        found = groups.control.gather(mine)
        if groups.rank == 0:
            assert isinstance(plan, StepPlan), "the host of rank 0 has the plan of all ranks"
            write_durably(self._folder.plan, plan.to_bytes())
            write_json(self._folder.trace, {"step": step, "spans": [span for spans in found for span in spans]})


def _shows(plan: RankPlan) -> tuple[int, bool]:
    """The largest degree of a plan, and whether it has unsplit sequences."""
    return plan.max_degree, plan.unsplit_tokens > 0
