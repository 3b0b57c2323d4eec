"""Writes the tokens that the ranks of a host need for a step or a validation set: one rank file for each HDP rank.

It runs in the process of a host that gets each plan. The ranks of the host map its files, and read no blocks.

```
 FOLDER/step-7.3              step 7 of HDP rank 3; steps are counted from 1, as in metrics
        validation-0.3        the validation set of source 0
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.data.inputs import Reads
from engine.data.rank_file import RankFiles, RankHead, ranges_of, write_rank_file
from engine.data.runtime.runtime import PlannedSequences
from engine.data.sequences import SequenceTable
from engine.planner.plan.step_plan import RankPlan

_KEPT_STEPS = 2  # the step that runs, and the next; ranks of a host open their files at different times


class Constructor:
    """Writes the rank files of some HDP ranks into a folder."""

    def __init__(self, reader: Reads, folder: Path, ranks: Sequence[int], epoch: int = 0) -> None:
        """Take the HDP ranks of the host. `folder` must exist; the caller removes it.

        `epoch` is that of this process: if it replaces another one, it must have a higher number.
        """
        self._reader, self._folder, self._ranks, self._epoch = reader, folder, ranks, epoch
        for draft in folder.glob(".*"):  # of a process that was killed
            draft.unlink(missing_ok=True)

    def build(self, name: str, table: SequenceTable, plan: RankPlan) -> RankFiles:
        """Write the files of one set of sequences.

        All ranges of the host are read in one call. Raises DataError and StorageError as `Reads.read` and
        `write_rank_file`.
        """
        files = RankFiles(self._folder, name, self._epoch)
        of_ranks = [ranges_of(self._reader.names, table, plan, rank) for rank in self._ranks]
        slices = iter(self._reader.read([one for ranges in of_ranks for one in ranges]))
        for rank, ranges in zip(self._ranks, of_ranks, strict=True):
            head = RankHead.of(name, rank, plan, ranges, self._epoch)
            write_rank_file(files.path(rank), head, [next(slices) for _ in ranges])
        return files

    def build_step(self, step: int, table: SequenceTable, plan: RankPlan) -> RankFiles:
        """Write the files of a step, and remove those of the steps before the last one.

        They are not needed: a step is requested when the one before has begun on the first rank of the host, and no
        rank begins a step before all have finished the last.
        """
        for file in self._folder.glob("step-*"):  # also those of a process that this one replaces
            if int(file.stem.removeprefix("step-")) <= step - _KEPT_STEPS:
                file.unlink(missing_ok=True)
        return self.build(f"step-{step}", table, plan)

    def build_sets(self, sets: Mapping[str, PlannedSequences]) -> dict[str, RankFiles]:
        """Write the files of validation sets, by the name of the source."""
        return {
            name: self.build(f"validation-{number}", planned.table, planned.plan)
            for number, (name, planned) in enumerate(sets.items())
        }
