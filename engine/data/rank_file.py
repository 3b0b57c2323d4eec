"""The tokens of one HDP rank for a step or a validation set, in one file, which all its tp and pp ranks map.

```
 plan --wanted--> ranges of the rank --Blocks.slices--> rank file --rank_inputs--> tokens, labels, positions
```
A file has the slices of all ranges that the micro-batches of the rank read, in their order. Labels and positions follow
from the plan. The head says for which step, plan, ranges and rank the file was written, and by which epoch of its
writer. A reader rejects any other file, and a damaged one.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from engine.data.arrays import from_bytes, to_bytes
from engine.data.blocks.blocks import Range, Slice
from engine.data.blocks.served import Parted, joined
from engine.data.inputs import wanted
from engine.data.parts import unwritable
from engine.data.sequences import SequenceTable
from engine.errors import StorageError
from engine.folders import random_name
from engine.planner.plan.step_plan import RankPlan
from engine.readers import open_regular

_HASH_BYTES = 16
_HINT = "resume the run, which writes it again"


@dataclass(frozen=True)
class RankHead:
    """What a rank file was written for, and by whom."""

    name: str  # of the step or the validation set
    rank: int  # HDP rank
    plan: str  # digest of the plan
    ranges: str  # hash of the ranges
    epoch: int = 0  # of the process that wrote it: one that replaces another has a higher number

    @classmethod
    def of(cls, name: str, rank: int, plan: RankPlan, ranges: Sequence[Range], epoch: int = 0) -> RankHead:
        listed = repr([tuple(one) for one in ranges]).encode("utf-8", "surrogateescape")
        return cls(name, rank, plan.digest, blake2b(listed, digest_size=_HASH_BYTES).hexdigest(), epoch)


def ranges_of(names: Sequence[str], table: SequenceTable, plan: RankPlan, rank: int) -> list[Range]:
    """Return all ranges that an HDP rank reads, micro-batch by micro-batch. `names` are those of the sources."""
    return [one for micro in plan.of_rank(rank) for one in wanted(names, table, micro)]


def write_rank_file(path: Path, head: RankHead, slices: Sequence[Slice]) -> int:
    """Write the slices of the ranges of a rank; return the bytes of the file. It appears complete, or not at all.

    It is not synced: after a crash of the host it is written again. Raises StorageError.
    """
    content = to_bytes(asdict(head), joined(slices))
    draft = path.with_name(f".{path.name}.{random_name()}")
    try:
        try:
            with draft.open("xb") as file:
                file.write(content)
            draft.replace(path)
        except OSError:
            with suppress(OSError):
                draft.unlink(missing_ok=True)  # a full disk gets its space back
            raise
    except OSError as error:
        raise unwritable(error, path) from error
    return len(content)


class RankFile:
    """A mapped rank file: the reader from which `rank_inputs` gets the tokens of a rank."""

    def __init__(self, names: Sequence[str], numbers: dict[Range, int], slices: Parted) -> None:
        """See `open`."""
        self.names = names  # of the sources
        self._numbers, self._slices = numbers, slices

    @classmethod
    def open(cls, path: Path, head: RankHead, names: Sequence[str], ranges: Sequence[Range]) -> RankFile:
        """Map the file with this head, which has the slices of `ranges` of sources of these names.

        Raises StorageError if it is missing, another one, or damaged.
        """
        try:
            with open_regular(path, StorageError, _HINT) as file:
                found, arrays = from_bytes(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
        except OSError as error:
            raise StorageError(f"cannot be read: {error.strerror}", key=str(path), hint=_HINT) from error
        except ValueError as error:
            raise StorageError(f"is damaged: {error}", key=str(path), hint=_HINT) from error
        if differing := [key for key, value in asdict(head).items() if found.get(key) != value]:
            what = ", ".join(f"{key} is {found.get(key)} instead of {getattr(head, key)}" for key in differing)
            raise StorageError(f"is another one than was planned: {what}", key=str(path), hint=_HINT)
        return cls(names, {one: number for number, one in enumerate(ranges)}, Parted(arrays))

    def read(self, wanted: Sequence[Range]) -> list[Slice]:
        """Return the tokens of ranges of this rank."""
        return [slice_ for one in wanted if (slice_ := self._slices[self._numbers[one]]) is not None]


class RankFiles(NamedTuple):
    """Where the rank files of a step or a validation set are. It is sent to ranks with the plan."""

    folder: Path
    name: str  # of the step or the validation set
    epoch: int  # of the process that wrote them

    def path(self, rank: int) -> Path:
        """Return the file of an HDP rank."""
        return self.folder / f"{self.name}.{rank}"

    def open(self, names: Sequence[str], table: SequenceTable, plan: RankPlan, rank: int) -> RankFile:
        """Map the file of an HDP rank. `names` are those of the sources. Raises StorageError as `RankFile.open`."""
        ranges = ranges_of(names, table, plan, rank)
        return RankFile.open(self.path(rank), RankHead.of(self.name, rank, plan, ranges, self.epoch), names, ranges)
