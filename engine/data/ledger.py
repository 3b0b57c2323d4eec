"""The ledger of a run: which documents were in each step, where they ran, and hashes of their contents.

```
 RUN/ledger/sources.json             the format, and names of the sources, by their number in the ledger
            documents-00000000.bin   rows of steps 1 .. 1000, each a sequence: ROW. The same for any number of ranks
            ranks-00000000.bin       rows of steps 1 .. 1000, each a shard of a sequence: SHARD
            hashes-00000000.bin      rows of steps 1 .. 1000, each the hashes of a step's rows in both files: HASHES
            documents-00000001.bin   ... of steps 1001 .. 2000
            replaced.bin             rows of steps that were run before the run went back, until they are run again
```
Steps are only appended, except that a repeated step replaces the steps from it on. Then documents must have the same
contents as before; a run that begins at step 1 again has a new ledger. The oldest files are removed when all together
exceed a limit.

A step is written before its metrics, so a step with metrics is complete; the rows of a later one may not be. Hashes are
not synced, so after a power loss the last steps may have none; neither have ledgers of earlier versions. A step without
a hash is not checked.

Letters: S sequences of a step, H shards of all sequences.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.data.sequences import SequenceTable
from engine.errors import DataError
from engine.files import append, new_file, sync, write_durably
from engine.format_number import format_number
from engine.planner.plan.step_plan import StepPlan
from engine.readers import HUGE, read_bytes, read_json
from engine.run.checkpoints import START_OVER

ROW = np.dtype(
    [
        ("step", "<u4"),
        ("source", "<u2"),  # number of its name in sources.json
        ("block", "<u4"),
        ("document", "<u4"),  # number in the block
        ("start", "<u8"),  # first input of the sequence in its document
        ("length", "<u4"),  # inputs
        ("loss_tokens", "<u4"),
        ("hash", "<u8"),  # of the content of the document
    ]
)
SHARD = np.dtype([("step", "<u4"), ("sequence", "<u4"), ("rank", "<u4")])  # in the order of each ring
HASHES = np.dtype([("step", "<u4"), ("documents", "<u8"), ("ranks", "<u8")])
STEPS = 1000  # of a file
LIMIT = 8 << 30  # bytes of all files but the last one
_KINDS = {"documents": ROW, "ranks": SHARD, "hashes": HASHES}
_PLACE = ["source", "block", "document"]
_RESTORE = "restore it from a copy; without one, training continues, but these steps cannot be traced"
FORMAT = 2  # of all files. In 1, sources.json is the list of names alone, and some ledgers have no hashes
Rows = NDArray[np.void]


class Ledger:
    """The ledger in a folder. One process writes it; others may read it at the same time."""

    def __init__(self, folder: Path, sources: Sequence[str] = (), limit: int = LIMIT) -> None:
        """Open a ledger. `sources` are the names of the sources by their number in tables, for a process that writes.

        Nothing is read or written yet.
        """
        self.folder, self._sources, self._limit = folder, sources, limit
        self._numbers: NDArray[np.int64]  # in the ledger, of each source
        self._is_known = False  # whether this version reads the format
        self._last: int | None = None  # step that this process has recorded
        self._replaced = np.empty(0, dtype=ROW)  # rows of steps that are run again

    @property
    def sources(self) -> list[str]:
        """The names of all sources that the run ever had, by their number in the ledger.

        Raises DataError if their file is damaged, or if a newer version wrote the ledger.
        """
        path = self.folder / "sources.json"
        hint = f"restore it from a copy, or rename {self.folder}: the run then begins another ledger"
        try:
            found = read_json(path, hint=hint)
        except FileNotFoundError:
            return []
        if isinstance(found, dict):
            format_number(found, FORMAT, str(path))
            found = found.get("sources")
        if not (isinstance(found, list) and all(isinstance(name, str) for name in found)):
            raise DataError("is damaged: it does not list the sources of the run", key=str(path), hint=hint)
        return found

    @property
    def first(self) -> int | None:
        """The first step that has not been removed; None if there is no step."""
        return next((int(rows["step"][0]) for rows, _ in self.parts() if len(rows)), None)

    def record(self, step: int, table: SequenceTable, plan: StepPlan) -> None:
        """Append a step, after all steps from it on have been removed. Steps are counted from 1.

        Raises DataError if the step was run before and a document has other contents now; nothing is changed then.
        Raises OSError if writing fails.
        """
        if self._last != step - 1:
            self._begin(step)
        # The rows are compared before anything is removed, so that an error leaves the ledger as it was.
        rows = np.empty(len(table), dtype=ROW)
        rows["step"], rows["source"] = step, self._numbers[table.source]
        for name in ("block", "document", "start", "length", "loss_tokens", "hash"):
            rows[name] = getattr(table, name)
        self._check_contents(rows)
        if self._last != step - 1:
            self._remove_from(step)
        first = plan.before[plan.shard_slice] == 0  # all slices of a sequence have the same ring
        shards = np.empty(int(first.sum()), dtype=SHARD)
        shards["step"], shards["rank"] = step, plan.ring_ranks[first]
        shards["sequence"] = plan.slice_sequence[plan.shard_slice[first]]
        hashes = np.array([(step, _hash(rows), _hash(shards))], dtype=HASHES)
        # Hashes last: a crash may leave rows without a hash, which are not checked, but never a hash without its rows.
        for kind, new in (("documents", rows), ("ranks", shards), ("hashes", hashes)):
            path = self._path(kind, _number(step))
            is_new = not path.exists()
            with append(path) as file:
                file.write(new.tobytes())
                if kind != "hashes":  # synced, so that no checkpoint is newer than the ledger
                    file.flush()
                    os.fsync(file.fileno())
            if is_new:
                sync(self.folder)
        self._last = step
        # All steps that the run went back over have been run again and compared.
        if len(self._replaced) and step >= self._replaced["step"][-1]:
            self._replaced = np.empty(0, dtype=ROW)
            self._replaced_path.unlink()
        if step % STEPS == 1:
            self._forget()

    def documents(self, step: int) -> Rows:
        """Return the sequences of a step: ROW [S], none if the ledger does not have it.

        Raises DataError if they do not match their hash.
        """
        return self._checked("documents", step)

    def shards(self, step: int) -> Rows:
        """Return the shards of the sequences of a step: SHARD [H]. A rank is an HDP rank. Raises as `documents`."""
        return self._checked("ranks", step)

    def damaged(self, step: int | None = None) -> list[str]:
        """Return the damage of each file, its first step that does not match its hash; empty if all are intact.

        With a `step` only the files of that step are read.
        """
        found, numbers = list[str](), {*self._files(), *self._files("hashes")}
        for number in sorted(numbers if step is None else numbers & {_number(step)}):
            hashes = self._read("hashes", number)
            for kind in ("documents", "ranks"):
                rows = self._read(kind, number)
                wrong = (one for one in hashes["step"].tolist() if not _matches(rows, hashes, kind, one))
                if (first := next(wrong, None)) is not None:
                    found.append(f"{self._path(kind, number).name}: step {first} does not match its hash")
        return found

    def _checked(self, kind: str, step: int) -> Rows:
        """Return the rows of a step of the files `kind`. Raises DataError if they do not match their hash."""
        rows, number = self._read(kind, _number(step)), _number(step)
        if not _matches(rows, self._read("hashes", number), kind, step):
            path = self._path(kind, number)
            raise DataError(f"is damaged: step {step} does not match its hash", key=str(path), hint=_RESTORE)
        return _of_step(rows, step)

    def parts(self) -> Iterator[tuple[Rows, Rows]]:
        """Yield the sequences and shards of all steps, those of some steps at a time, in order: ROW [n], SHARD [m]."""
        for number in self._files():
            yield self._read("documents", number), self._read("ranks", number)

    @property
    def _replaced_path(self) -> Path:
        return self.folder / "replaced.bin"

    def _path(self, kind: str, number: int) -> Path:
        return self.folder / f"{kind}-{number:08d}.bin"

    def _files(self, kind: str = "documents") -> list[int]:
        """Return the numbers of all files, ascending."""
        return sorted(int(path.stem.rpartition("-")[2]) for path in self.folder.glob(f"{kind}-*.bin"))

    def _read(self, kind: str, number: int) -> Rows:
        """Read the rows of a file; none if there is no file.

        Excludes data that a crash may have left at its end: an incomplete row or, after a power loss, any bytes.
        """
        if not self._is_known:
            self._is_known = bool(self.sources)  # raises DataError if a newer version wrote the ledger
        dtype = _KINDS[kind]
        try:
            content = read_bytes(self._path(kind, number), HUGE)
        except FileNotFoundError:
            content = b""
        rows = np.frombuffer(content[: len(content) // dtype.itemsize * dtype.itemsize], dtype=dtype)
        steps = rows["step"].astype(np.int64)
        wrong = ((steps - 1) // STEPS != number) | (np.diff(steps, prepend=0) < 0)
        return rows[: int(wrong.argmax())] if wrong.any() else rows

    def _begin(self, step: int) -> None:
        """Look up the numbers of the sources, and the rows of steps from `step` on that are run again.

        These rows are stored in a separate file. If the run goes back again before all of these steps have been
        repeated, the remaining rows are still compared.
        """
        # A source keeps its number when sources are added or left out, because earlier rows contain it.
        self.folder.mkdir(exist_ok=True)
        known = self.sources
        if new := [name for name in self._sources if name not in known]:
            known += new
            write_durably(self.folder / "sources.json", json.dumps({"format": FORMAT, "sources": known}).encode())
        self._numbers = np.array([known.index(name) for name in self._sources], dtype=np.int64)
        # Rows of this ledger come first. Those of an earlier `replaced.bin` follow, of steps that have not been run
        # again since.
        draft, last = self._replaced_path.with_suffix(".writing"), step - 1
        with new_file(draft) as file:
            for number in self._files():
                if number < _number(step):
                    continue
                rows, shards, hashes = (self._read(kind, number) for kind in _KINDS)
                sound = [step for step in np.unique(rows["step"]).tolist() if _matches(rows, hashes, "documents", step)]
                rows = rows[np.isin(rows["step"], sound)]  # damaged rows are not evidence of other contents
                if len(shards):  # rows of a last step without shards may be remains of a power loss
                    last = max(last, int(shards["step"][-1]))
                    first, stop = np.searchsorted(rows["step"], [step, last + 1])
                    file.write(rows[first:stop].tobytes())
            with suppress(FileNotFoundError):
                before = np.fromfile(self._replaced_path, dtype=ROW)
                file.write(before[np.searchsorted(before["step"], last, side="right") :].tobytes())
            file.flush()
            os.fsync(file.fileno())
        # Renamed when complete: a crash leaves either the old rows or the new ones.
        if draft.stat().st_size:
            draft.replace(self._replaced_path)
            self._replaced = np.memmap(self._replaced_path, dtype=ROW, mode="r")
        else:
            draft.unlink()
            self._replaced_path.unlink(missing_ok=True)

    def _check_contents(self, now: Rows) -> None:
        """Raise DataError if a document had other contents when the step of these rows was run before."""
        step = int(now["step"][0])
        before = _of_step(self._replaced, step)
        if not len(before):
            return
        known = dict(zip(before[_PLACE].tolist(), before["hash"].tolist(), strict=True))
        for place, content in zip(now[_PLACE].tolist(), now["hash"].tolist(), strict=True):
            if known.get(place, content) != content:
                source, block, number = place
                document = f"{self.sources[source]}:{block}:{number}"
                message = f"document {document} has changed since step {step} was run before"
                run = shlex.quote(str(self.folder.parent))
                shown = f"`bytescale data trace {run} --document {document}` shows its place"
                hint = f"restore it ({shown}), or start over: {START_OVER}"
                raise DataError(message, key=str(self.folder), hint=hint)

    def _remove_from(self, step: int) -> None:
        """Remove all steps from `step` on, and any bytes that a crash has left after the last one."""
        for kind, dtype in reversed(_KINDS.items()):  # hashes first: other processes may be reading
            for path in self.folder.glob(f"{kind}-*.bin"):
                number = int(path.stem.rpartition("-")[2])
                if number > _number(step):
                    path.unlink()
                elif number == _number(step):
                    kept = int(np.searchsorted(self._read(kind, number)["step"], step))
                    with append(path) as file:
                        file.truncate(kept * dtype.itemsize)

    def _forget(self) -> None:
        """Remove the oldest files while all but the last one exceed the limit."""
        *numbers, _ = self._files()
        paths = {number: [self._path(kind, number) for kind in reversed(_KINDS)] for number in numbers}
        paths = {number: [path for path in found if path.exists()] for number, found in paths.items()}
        sizes = {number: sum(path.stat().st_size for path in found) for number, found in paths.items()}
        for number in numbers:
            if sum(sizes.values()) <= self._limit:
                break
            del sizes[number]
            for path in paths[number]:
                path.unlink()


def _hash(rows: Rows) -> int:
    return int.from_bytes(blake2b(rows.tobytes(), digest_size=8).digest(), "little")


def _matches(rows: Rows, hashes: Rows, kind: str, step: int) -> bool:
    """Return whether the rows of a step match its hash, if it has one."""
    known = _of_step(hashes, step)
    return not len(known) or _hash(_of_step(rows, step)) == int(known[kind][0])


def _number(step: int) -> int:
    """Return the number of the file of a step."""
    return (step - 1) // STEPS


def _of_step(rows: Rows, step: int) -> Rows:
    first, last = np.searchsorted(rows["step"], [step, step + 1])
    return rows[first:last]
