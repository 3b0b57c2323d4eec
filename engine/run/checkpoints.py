"""Writes and reads checkpoints. A checkpoint is complete or absent, and a damaged one is never used.

Checkpoint formats load a flipped bit without an error (in 40 of 40 trials), and a process that is killed while it
overwrites a checkpoint leaves half of it. Therefore a checkpoint is written under a temporary name, with a manifest of
hashes, and renamed when every byte is on disk. All hashes are checked before it is used. Does not import torch: the
launcher checks them before any rank starts.

manifest.json has two lines of JSON: its content, and the BLAKE2b hash of the first line. Without this hash, a flipped
bit in the manifest changed where the run resumed, or rejected it for a wrong reason. A file consists of the parts that
ranks have written, one after the other. Parts are hashed in blocks, so that several processes can share the work of a
large one. files.jsonl has the rank, size and hashes of each part: a line of it, a page, is an object of some files, and
its own hash is in manifest.json. So among thousands of ranks, a rank reads a page or two, to hash a share of the blocks
and to find the part of a rank. In older versions each rank has files of its own; before, manifest.json has their hashes
itself; in the first ones it has one line, and one hash per file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from engine.config.units import counted, format_bytes
from engine.control import progress
from engine.errors import CheckpointError, StorageError, storage_error
from engine.files import sync, write_durably
from engine.folders import Draft, opened, remove_folder
from engine.format_number import format_number
from engine.readers import LARGE, parse_line, read_bytes

# Of the manifest; those of the first versions have no number. In 1, the cursor has no number of its order. Up to 2,
# manifest.json has the sizes and hashes of the files; up to 3, no file has parts of several ranks.
FORMAT = 4
MANIFEST, FILES = "manifest.json", "files.jsonl"
PREFIX = "step-"
BLOCK = 64 << 20  # bytes per hash
_PAGE = 64  # parts after which a page ends
_TENSORS = ".states", ".pt"  # suffixes of files with tensors: of a node, and of a rank in older checkpoints
DAMAGED = "checkpoint is damaged: "
_log = logging.getLogger(__name__)
Share = Callable[[Any], Mapping[int, Any]]  # returns the values of the ranks of this node, by rank
_TORCH = "PytorchStreamWriter", "inline_container"  # in errors of torch.save, which hides the OSError
COPY_AGAIN = "copy the checkpoint again, or use another one"  # of one that lacks a part
START_OVER = "`train --resume never` starts again from step 1 and keeps the old run in a folder next to it"


class Range(NamedTuple):
    """Bytes start .. stop - 1 of a file of a checkpoint, which one rank writes."""

    file: str  # path in the folder
    start: int
    stop: int


class Part(NamedTuple):
    """Bytes of a file that one rank has written; they follow those of the part before."""

    rank: int | None  # None in older checkpoints, whose files have one part
    size: int | None  # None in the first manifests
    hashes: Sequence[str]  # of its blocks


class Exchange(Protocol):
    """What `write` needs of `Control`: exchanges that a thread may use beside the collectives of another."""

    def share(self, name: str, value: Any) -> Mapping[int, Any]:
        """Return the values of all ranks of this node, by rank."""

    def collect(self, name: str, value: Any) -> Sequence[Any]:
        """Return the values of all ranks to rank 0, in their order."""


class UnknownFormatError(CheckpointError):
    """A newer version wrote the checkpoint. It is not damaged: an older one of the run must not take its place."""


@dataclass(frozen=True)
class TrainState:
    """What a run needs to resume in addition to the tensors, as plain data."""

    step: int  # the last finished step
    cursor: dict[str, Any]  # where the next step begins in the order of documents, see engine/data/steps.py
    ranks: int  # number of ranks that wrote the checkpoint
    fingerprints: Mapping[str, str]  # of the documents of each source, by name
    must_match: dict[str, Any]  # config values that a resumed run must keep, see compatibility.py
    tokenizer: Mapping[str, Any] | None = None  # of texts, from `tokenizer_facts`; None in older checkpoints
    skipped: int = 0  # how many of the last steps, in a row, were skipped (run.on_nan=skip)
    mesh: Mapping[str, int] | None = None  # tp and pp of the ranks; None in older checkpoints


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint folder, such as step-00000100."""
    return f"{PREFIX}{step:08d}"


@contextmanager
def _shared_draft(checkpoints: Path, name: str, token: str, files: Iterable[str]) -> Iterator[Draft]:
    """Open the draft of the checkpoint `name`, and close it at the end; it stays, as other ranks may be writing in it.

    Turns an error of the disk into a StorageError with path and bytes, and removes `files`, those that this rank writes
    in. The next start removes the rest.
    """
    draft: Draft | None = None
    try:
        with opened(checkpoints, make=True, follow_links=False) as parent:
            draft = Draft.shared(parent, name, token)
            yield draft
    except (OSError, RuntimeError) as error:
        if not (storage_error(error) or any(sign in str(error) for sign in _TORCH)):
            raise
        content: Path | None = None
        with suppress(OSError):
            content = None if draft is None or draft.closed else draft.path
        message = f"a checkpoint could not be written: {format_bytes(bytes_of(content) if content else 0)} were written"
        with suppress(OSError):
            message += f", {format_bytes(shutil.disk_usage(checkpoints).free)} are free"
        if content:
            for file in files:
                (content / file).unlink(missing_ok=True)
        hint = "free some space, or set a smaller run.keep_checkpoints; then resume the run"
        place = checkpoints / f".writing-{name}.{token}"
        raise StorageError(message, key=str(place), hint=hint) from error
    finally:
        if draft is not None:
            draft.close()


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint's folder; -1 if the name has none."""
    prefix, digits = folder.name[: len(PREFIX)], folder.name[len(PREFIX) :]
    return int(digits) if prefix == PREFIX and digits.isdecimal() else -1


def newest_first(checkpoints: Path) -> list[Path]:
    """List the finished checkpoints in a folder, newest first; none if there is no such folder.

    One that is still being written is not listed. Raises PermissionError for a folder that cannot be listed, where
    `Path.glob` would find nothing, and the run would start over.
    """
    try:
        with os.scandir(checkpoints) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(PREFIX) and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [checkpoints / name for name in sorted(names, reverse=True)]


def write(
    checkpoints: Path,
    state: TrainState,
    rank: int,
    save_tensors: Callable[[Path, Share], Iterable[Range]],
    token: str,
    control: Exchange,
) -> Path:
    """Write this rank's part of a checkpoint. Rank 0 waits for the parts of all ranks, and publishes the checkpoint.

    All ranks must call it, on a shared file system. It may run in a thread during a training step: it calls no
    collective, and the exchanges of `control` need no order among them. `save_tensors(folder, share)` writes the bytes
    of this rank; it yields their ranges, each before it is written, or returns all. With `share` the ranks of a node
    agree on the ranges of a file. Only a rank that has written and synced all of its bytes reports them to rank 0, so a
    checkpoint with a file that misses a part is never published.

    `token`, from `folders.random_name`, is the same on all ranks, and another one at each start: it names the draft.
    Returns the checkpoint's folder, which exists when rank 0 returns. Raises StorageError if the disk is full or fails;
    then the files that this rank writes in are removed, or there would be no space to report it.
    """
    name, files = folder_name(state.step), list[str]()
    with _shared_draft(checkpoints, name, token, files) as draft:
        folder, ranges = draft.path, list[Range]()
        for one in save_tensors(folder, partial(control.share, name)):
            files.append(one.file)
            ranges.append(one)
        # Synced before the manifest exists: it must not describe bytes that a power loss can undo.
        written = list[tuple[Range, list[str]]]()
        for one in ranges:
            sync(folder / one.file)
            written.append((one, [_hash(folder / one.file, *block) for block in _blocks(one.start, one.stop)]))
        of_ranks = control.collect(name, written)  # rank 0 may publish the folder from here on
        if rank == 0:
            write_manifest(folder, state, of_ranks)
            progress.reach("rename")
            draft.publish()
    return checkpoints / name


def _blocks(start: int, stop: int) -> list[tuple[int, int]]:
    """Return start and length of the blocks of a range of bytes."""
    return [(at, min(BLOCK, stop - at)) for at in range(start, stop, BLOCK)]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of a run are kept: a checkpoint stays if one of the three numbers keeps it."""

    newest: int  # at least 1
    every: int = 0  # those of steps that are multiples of this; 0 for none
    best: int = 0  # those with the lowest validation losses

    def removes(self, folders: Sequence[Path], losses: Mapping[int, float]) -> list[Path]:
        """Return those of `folders`, newest first, that are not kept. `losses` has validation losses by step.

        A checkpoint of a step without validation is never among the best.
        """
        kept, steps = set(folders[: self.newest]), {folder: step_of(folder) for folder in folders}
        if self.every:
            kept |= {folder for folder, step in steps.items() if step % self.every == 0}
        kept |= set(sorted((f for f in folders if steps[f] in losses), key=lambda f: losses[steps[f]])[: self.best])
        return [folder for folder in folders if folder not in kept]


def prune(written: Path, keep: Retention, losses: Mapping[int, float]) -> None:
    """Remove checkpoints that `keep` does not keep; the one just `written` counts as the newest.

    Training continues if one cannot be removed now, for example because another process reads it on NFS: the next start
    removes it.
    """
    others = [folder for folder in newest_first(written.parent) if folder != written]
    for old in keep.removes([written, *others], losses):
        try:
            remove_folder(old)
        except OSError as error:
            _log.warning("%s cannot be removed now: %s", old, error)


def abandon(checkpoints: Path, step: int, say: Callable[[str], None]) -> None:
    """Rename the checkpoints of steps after `step`, from which the run resumes (0 for a new run).

    They are damaged, or the user chose an earlier checkpoint. If they kept their names, the next resume would use them,
    and `prune` would keep them as the newest.
    """
    for folder in newest_first(checkpoints):
        if folder.name > folder_name(step):
            kept = set_aside(folder).name
            say(f"{folder.name} is newer than step {step}, from which this run resumes; it is kept as {kept}")


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint, so that no run resumes from it, and return its new path."""
    return folder.rename(folder.with_name(f"abandoned-{folder.name}-{time.time_ns()}"))


class _Page(NamedTuple):
    """A line of FILES."""

    blocks: int  # hashes in it
    length: int  # bytes
    hash: str
    first: int = 0  # rank that has written in its files


@dataclass(frozen=True)
class _Head:
    """The content of manifest.json."""

    state: TrainState
    block: int | None  # bytes per hash; None in older manifests, which have one hash per file
    has_parts: bool  # False in older manifests: each file is of one rank, found by its name
    pages: Sequence[_Page]
    files: Mapping[str, Sequence[Part]] | None  # in older manifests, the only page

    def page(self, number: int, content: bytes, folder: Path) -> Mapping[str, Sequence[Part]]:
        """Return the parts of the files of a page, of which FILES has `content`. Raises CheckpointError."""
        with _reports_damage(folder, FILES):
            if len(content) != self.pages[number].length or _short_hash(content) != self.pages[number].hash:
                raise _damage(folder, f"{FILES} does not match its hash")
            found = dict[str, Sequence[Part]]()
            for name, parts in parse_line(content).items():
                values = parts if self.has_parts else [(None, *parts)]
                found[_inside(name, folder, FILES)] = [Part(*value) for value in values]
            return found


@dataclass(frozen=True)
class Manifest:
    """The state of a checkpoint, and the parts of each of its files."""

    state: TrainState
    block: int | None  # bytes per hash; None in older manifests, which have one hash per file
    files: Mapping[str, Sequence[Part]]  # by the file's path in the folder

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the files in bytes; the first manifests had none."""
        sizes = {name: [part.size for part in parts] for name, parts in self.files.items()}
        return {name: sum(filter(None, found)) for name, found in sizes.items() if None not in found}


def read(folder: Path) -> TrainState:
    """Check the hash of every file and return the state. Raises CheckpointError that names the damage."""
    check_sizes(folder)  # first, because hashing takes minutes
    check_hashes(folder)
    return read_state(folder)


def check_sizes(folder: Path) -> None:
    """Raise CheckpointError if a file is missing or its size differs from the manifest, or if that is damaged.

    A file of tensors that the manifest does not list is an error, too: it may belong to another checkpoint, and one in
    the form of older versions could be loaded without a check of its hash.
    """
    manifest = read_manifest(folder)
    tensors = (path for path in folder.rglob("*") if path.suffix in _TENSORS)
    if unlisted := {path.relative_to(folder).as_posix() for path in tensors} - {*manifest.files}:
        raise _damage(folder, f"{min(unlisted)} is not in {MANIFEST}")
    with _reports_damage(folder):
        for name in manifest.files:
            size = _size(folder / name)
            if size != manifest.sizes.get(name, size):
                raise _damage(folder, f"{name} has {counted(size, 'byte')} instead of {manifest.sizes[name]:,}")


def check_hashes(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Compare the blocks of all files with their hashes, or one of `parts` shares of the blocks.

    Raises CheckpointError that names the first damaged file of this part.
    """
    head = _read_head(folder)
    total = sum(page.blocks for page in head.pages)
    # Blocks first .. stop - 1 of all are this part.
    first, stop = (-(-total * at // parts) for at in (part, part + 1))
    before, offset = 0, 0
    for number, page in enumerate(head.pages):
        if max(first, before) < min(stop, before + page.blocks):
            blocks = [
                (name, *block)
                for name, parts in _read_page(folder, head, number, offset).items()
                for block in blocks_of(parts, head.block)
            ]
            for name, start, length, digest, whose in blocks[max(0, first - before) : stop - before]:
                with _reports_damage(folder, name):
                    if _hash(folder / name, start, _size(folder / name) if length is None else length) != digest:
                        raise _damage(folder, f"{name} does not match its hash{whose}")
        before, offset = before + page.blocks, offset + page.length


def blocks_of(parts: Sequence[Part], block: int | None) -> Iterator[tuple[int, int | None, str, str]]:
    """Yield start, length and hash of the blocks of a file, and words that name the part, to end a sentence.

    The length is None for the whole file, where `block`, the bytes per hash, is None; else at most `block`.
    """
    at = 0
    for part in parts:
        whose = f" in the part of rank {part.rank}" if len(parts) > 1 else ""
        for number, digest in enumerate(part.hashes):
            length = block
            if block is not None and part.size is not None:
                length = min(block, part.size - number * block)
            yield at + number * (block or 0), length, digest, whose
        at += part.size or 0


class Parts:
    """Finds the part of each rank. Reads manifest.json, and a page of FILES when it is first needed.

    Raises CheckpointError if one of them is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._head = folder, _read_head(folder)
        self._read = dict[int, Mapping[int | None, Range]]()  # by page, then by rank

    @property
    def state(self) -> TrainState:
        """The state of the checkpoint."""
        return self._head.state

    @property
    def known(self) -> bool:
        """Whether there are parts. In older checkpoints each rank has files of its own, with its number in the name."""
        return self._head.has_parts

    def of(self, rank: int) -> Range:
        """Return where the part of a rank is. Raises CheckpointError if it is nowhere."""
        pages = self._head.pages
        number = max(0, bisect_right(pages, rank, key=lambda page: page.first) - 1)
        if number not in self._read and pages:
            offset, found = sum(page.length for page in pages[:number]), dict[int | None, Range]()
            for name, parts in _read_page(self._folder, self._head, number, offset).items():
                ends = [*accumulate((part.size or 0 for part in parts), initial=0)]
                found |= {part.rank: Range(name, *both) for part, both in zip(parts, pairwise(ends), strict=True)}
            self._read[number] = found
        if rank not in self._read.get(number, {}):
            raise CheckpointError(f"has no part of rank {rank}", key=str(self._folder), hint=COPY_AGAIN)
        return self._read[number][rank]


def _read_page(folder: Path, head: _Head, number: int, offset: int) -> Mapping[str, Sequence[Part]]:
    """Read a page, which is at a byte of FILES. Raises CheckpointError if it is damaged."""
    if head.files is not None:
        return head.files
    with _reports_damage(folder, FILES), (folder / FILES).open("rb") as file:
        file.seek(offset)
        content = file.read(head.pages[number].length)
    return head.page(number, content, folder)


def read_state(folder: Path) -> TrainState:
    """Read the state of a checkpoint. Its other files are not checked; `read` checks them too.

    Raises CheckpointError if the checkpoint or its manifest cannot be read.
    """
    return _read_head(folder).state


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint. Raises CheckpointError if it is missing or damaged."""
    return _whole(_read_head(folder), folder, lambda: read_bytes(folder / FILES, LARGE, CheckpointError))


def _read_head(folder: Path) -> _Head:
    if not folder.is_dir():
        hint = "`bytescale ckpt list RUN` shows the checkpoints of a run"
        raise CheckpointError("no such checkpoint", key=str(folder), hint=hint)
    with _reports_damage(folder):
        content = read_bytes(folder / MANIFEST, LARGE, CheckpointError)
    return _parse_head(content, folder)


def parse_manifest(content: bytes, folder: Path, read_files: Callable[[], bytes]) -> Manifest:
    """Check the content of manifest.json, and of files.jsonl, of the checkpoint `folder`.

    Raises CheckpointError if one is damaged, UnknownFormatError if a newer version wrote it.
    """
    return _whole(_parse_head(content, folder), folder, read_files)


def _whole(head: _Head, folder: Path, read_files: Callable[[], bytes]) -> Manifest:
    """Join all pages."""
    files = dict[str, Sequence[Part]](head.files or {})
    if head.files is None:
        with _reports_damage(folder, FILES):
            content = read_files()
        if len(content) != sum(page.length for page in head.pages):
            raise _damage(folder, f"{FILES} does not match its hash")
        ends = accumulate(page.length for page in head.pages)
        for number, (page, end) in enumerate(zip(head.pages, ends, strict=True)):
            files |= head.page(number, content[end - page.length : end], folder)
    return Manifest(head.state, head.block, files)


def _parse_head(content: bytes, folder: Path) -> _Head:
    with _reports_damage(folder):
        first, _, second = content.partition(b"\n")
        if second and second != _seal(first):
            raise _damage(folder, f"{MANIFEST} does not match its hash")
        values = parse_line(first)
        # Only manifests of older versions, which hash whole files, have a single line.
        if not second and "block" in values:
            raise _damage(folder, f"{MANIFEST} is cut short")
        format_number(values, FORMAT, str(folder), UnknownFormatError)
        block, found = values.get("block"), None
        if "pages" in values:
            pages = [_Page(*page) for page in values["pages"]]
        else:
            files, sizes = values["files"], values.get("sizes", {})
            if block is None:
                files = {name: [digest] for name, digest in files.items()}
            found = {_inside(name, folder): [Part(None, sizes.get(name), of)] for name, of in files.items()}
            pages = [_Page(sum(map(len, files.values())), 0, "")]
        head = _Head(_state(values["state"]), block, values.get("format", 1) > 3, pages, found)
        if folder.name.startswith(PREFIX) and folder.name != folder_name(head.state.step):
            raise _damage(folder, f"{MANIFEST} is that of step {head.state.step}")
    return head


def _inside(name: str, folder: Path, said: str = MANIFEST) -> str:
    """Return the path of a file, as `said` there. Raises CheckpointError if it is not inside of the checkpoint."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise _damage(folder, f"{said} names files outside of the checkpoint")
    return name


def _state(values: dict[str, Any]) -> TrainState:
    if "lineage" in values:  # the field's first name
        values["must_match"] = values.pop("lineage")
    if "epoch" in values:  # of an older order of documents, which cannot be resumed; its weights can be exported
        del values["epoch"], values["position"]
        values |= {"cursor": {}, "fingerprints": {"data": values.pop("fingerprint")}}
    state = TrainState(**values)
    if not (isinstance(state.step, int) and isinstance(state.ranks, int)):
        raise TypeError("step and ranks are numbers")
    return state


def write_manifest(folder: Path, state: TrainState, of_ranks: Sequence[Sequence[tuple[Range, Sequence[str]]]]) -> None:
    """Write the manifest durably. `of_ranks` has, for each rank, the ranges that it has written, and their hashes.

    Raises ValueError if ranges overlap, or do not fill a file.
    """
    ranges = sorted((*span, rank, hashes) for rank, found in enumerate(of_ranks) for span, hashes in found)
    files = defaultdict[str, list[Part]](list)
    ends = defaultdict[str, int](int)
    for file, start, stop, rank, hashes in ranges:
        if start != ends[file]:
            raise ValueError(f"the part of rank {rank} begins at byte {start} of {file} instead of {ends[file]}")
        ends[file] = stop
        files[file].append(Part(rank, stop - start, hashes))

    # A page has whole files. They are in the order of their first ranks, by which a page is found.
    pages, parts = list[dict[str, list[Part]]](), _PAGE
    for name in sorted(files, key=lambda name: (files[name][0].rank, name)):
        if parts >= _PAGE:
            pages.append({})
            parts = 0
        pages[-1][name] = files[name]
        parts += len(files[name])
    lines = [json.dumps(page).encode() + b"\n" for page in pages]
    write_durably(folder / FILES, b"".join(lines))
    of_pages = [
        _Page(
            sum(len(part.hashes) for parts in page.values() for part in parts),
            len(line),
            _short_hash(line),
            min(part.rank or 0 for parts in page.values() for part in parts),
        )
        for page, line in zip(pages, lines, strict=True)
    ]
    values = {"format": FORMAT, "block": BLOCK, "state": asdict(state), "pages": of_pages}
    first = json.dumps(values).encode()
    write_durably(folder / MANIFEST, first + b"\n" + _seal(first))


def _seal(line: bytes) -> bytes:
    """Return the second line of a manifest: the hash of the first."""
    return json.dumps({"blake2b": _short_hash(line)}).encode() + b"\n"


def _short_hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@contextmanager
def _reports_damage(folder: Path, name: str = MANIFEST) -> Iterator[None]:
    """Turn errors from reading the file `name` of a checkpoint into a CheckpointError that names the damage.

    A file that this user may not read is not damaged: PermissionError passes, so that no older checkpoint is chosen.
    """
    try:
        yield
    except PermissionError:
        raise
    except FileNotFoundError as error:
        raise _damage(folder, f"{_shown(error.filename, folder)} is missing") from error
    except OSError as error:
        place = name if error.filename is None else _shown(error.filename, folder)
        raise _damage(folder, f"{place} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damage(folder, f"{name} is unreadable") from error


def _shown(file: str, folder: Path) -> str:
    """The path of a file as the manifest of the checkpoint has it."""
    path = Path(file)
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name


def _damage(folder: Path, what: str) -> CheckpointError:
    """Create the error for a damaged checkpoint. Its hint names another checkpoint of the run, if there is one."""
    others = [other.name for other in newest_first(folder.parent) if other != folder]
    hint = f"choose another checkpoint, such as {others[0]}" if others else START_OVER
    return CheckpointError(f"{DAMAGED}{what}", key=str(folder), hint=hint)


def bytes_of(folder: Path) -> int:
    """The bytes of all files in a folder that can be seen; others may be writing or removing some."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(place, name).stat().st_size
    return total


def _size(path: Path) -> int:
    return path.stat().st_size


def _hash(path: Path, start: int, length: int) -> str:
    """Hash `length` bytes of a file from byte `start`, or fewer where it ends."""
    with path.open("rb") as file:
        file.seek(start)
        return hash_of(file, length)


def hash_of(file: BinaryIO, length: int) -> str:
    """Hash the next `length` bytes of an open file, or fewer where it ends."""
    digest = hashlib.blake2b(digest_size=16)
    while length > 0 and (piece := file.read(min(length, 1 << 20))):
        digest.update(piece)
        length -= len(piece)
    return digest.hexdigest()
