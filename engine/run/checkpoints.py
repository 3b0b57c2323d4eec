"""Writes and reads checkpoints. A checkpoint is complete or absent, and a damaged one is never used.

Checkpoint formats load a flipped bit without an error (in 40 of 40 trials), and a process that is killed while it
overwrites a checkpoint leaves half of it. Therefore a checkpoint is written under a temporary name, with a manifest of
hashes, and renamed when every byte is on disk. All hashes are checked before it is used. Does not import torch: the
launcher checks them before any rank starts.

manifest.json has two lines of JSON: its content, and the BLAKE2b hash of the first line. Without this hash, a flipped
bit in the manifest changed where the run resumed, or rejected it for a wrong reason. Files are hashed in blocks, so
that several processes can share the work of a large file. files.jsonl has the sizes and hashes: each line, a page, is
an object of at most 64 files, and its own hash is in manifest.json. So among thousands of ranks, each of which hashes
a share, a rank reads a page or two. In older versions manifest.json has them itself; in the first ones it has one line,
and one hash per file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from engine.config.units import counted, format_bytes
from engine.control import progress
from engine.errors import CheckpointError, StorageError, storage_error
from engine.files import sync, write_durably
from engine.folders import Draft, opened, remove_folder
from engine.format_number import format_number
from engine.readers import LARGE, parse_line, read_bytes

# Of the manifest; those of the first versions have no number. In 1, the cursor has no number of its order. Up to 2,
# manifest.json has the sizes and hashes of the files.
FORMAT = 3
MANIFEST, FILES = "manifest.json", "files.jsonl"
PREFIX = "step-"
BLOCK = 64 << 20  # bytes per hash
_PAGE = 64  # files of a page
DAMAGED = "checkpoint is damaged: "
_log = logging.getLogger(__name__)
Facts = tuple[int, Sequence[str]]  # of a file: its size and the hashes of its blocks
Collect = Callable[[str, Any], Sequence[Any]]  # `Control.collect`
_TORCH = "PytorchStreamWriter", "inline_container"  # in errors of torch.save, which hides the OSError
START_OVER = "`train --resume never` starts again from step 1 and keeps the old run in a folder next to it"


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


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint folder, such as step-00000100."""
    return f"{PREFIX}{step:08d}"


@contextmanager
def _shared_draft(checkpoints: Path, name: str, token: str, files: Iterable[str]) -> Iterator[Draft]:
    """Open the draft of the checkpoint `name`, and close it at the end; it stays, as other ranks may be writing in it.

    Turns an error of the disk into a StorageError with path and bytes, and removes `files`, those of this rank. The
    next start removes the rest.
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
    save_tensors: Callable[[Path], Iterable[str]],
    token: str,
    collect: Collect,
) -> Path:
    """Write this rank's part of a checkpoint. Rank 0 waits for the parts of all ranks, and publishes the checkpoint.

    All ranks must call it, on a shared file system. It may run in a thread during a training step: it calls no
    collective, and `collect`, with which rank 0 gets the hashes of all files, needs no order among them.
    `save_tensors(folder)` writes the files of this rank; it yields their paths in the folder, each before the file is
    written, or returns all. `token`, from `folders.random_name`, is the same on all ranks, and another one at each
    start: it names the draft. Returns the checkpoint's folder, which exists when rank 0 returns. Raises StorageError if
    the disk is full or fails; then the files of this rank are removed, or there would be no space to report it.
    """
    name, files = folder_name(state.step), list[str]()
    with _shared_draft(checkpoints, name, token, files) as draft:
        folder = draft.path
        for file in save_tensors(folder):
            files.append(file)
        progress.reach("write")
        # Synced before the manifest exists: it must not describe bytes that a power loss can undo.
        facts = dict[str, Facts]()
        for file in files:
            sync(folder / file)
            size = _size(folder / file)
            facts[file] = size, [_hash(folder / file, start, BLOCK) for start in range(0, size, BLOCK)]
        for of_rank in collect(name, facts):  # rank 0 may publish the folder from here on
            facts |= of_rank
        if rank == 0:
            _write_manifest(folder, state, facts)
            progress.reach("rename")
            draft.publish()
    return checkpoints / name


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


@dataclass(frozen=True)
class _Head:
    """The content of manifest.json."""

    state: TrainState
    block: int | None  # bytes per hash; None in older manifests, which have one hash per file
    pages: Sequence[_Page]
    files: Mapping[str, tuple[int | None, Sequence[str]]] | None  # in older manifests, the only page

    def page(self, number: int, content: bytes, folder: Path) -> Mapping[str, tuple[int | None, Sequence[str]]]:
        """Return sizes and hashes of the files of a page, of which FILES has `content`. Raises CheckpointError."""
        with _reports_damage(folder, FILES):
            if len(content) != self.pages[number].length or _short_hash(content) != self.pages[number].hash:
                raise _damage(folder, f"{FILES} does not match its hash")
            return {
                _inside(name, folder, FILES): (size, hashes) for name, (size, hashes) in parse_line(content).items()
            }


@dataclass(frozen=True)
class Manifest:
    """The state of a checkpoint, and the size and hashes of each of its files."""

    state: TrainState
    block: int | None  # bytes per hash; None in older manifests, which have one hash per file
    files: Mapping[str, Sequence[str]]  # hashes of the blocks, by the file's path in the folder
    sizes: Mapping[str, int]  # in bytes; the first manifests had none


def read(folder: Path) -> TrainState:
    """Check the hash of every file and return the state. Raises CheckpointError that names the damage."""
    check_sizes(folder)  # first, because hashing takes minutes
    check_hashes(folder)
    return read_state(folder)


def check_sizes(folder: Path) -> None:
    """Raise CheckpointError if a file is missing or its size differs from the manifest, or if that is damaged.

    A file of tensors that the manifest does not have would be loaded without a hash.
    """
    manifest = read_manifest(folder)
    if unlisted := {path.relative_to(folder).as_posix() for path in folder.rglob("*.pt")} - {*manifest.files}:
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
            blocks: list[tuple[str, int, str]] = []  # file, number of the block in it, hash
            for name, (_, hashes) in _read_page(folder, head, number, offset).items():
                blocks += [(name, index, digest) for index, digest in enumerate(hashes)]
            for name, index, digest in blocks[max(0, first - before) : stop - before]:
                with _reports_damage(folder, name):
                    length = head.block or _size(folder / name)
                    if _hash(folder / name, index * length, length) != digest:
                        raise _damage(folder, f"{name} does not match its hash")
        before, offset = before + page.blocks, offset + page.length


def _read_page(folder: Path, head: _Head, number: int, offset: int) -> Mapping[str, tuple[int | None, Sequence[str]]]:
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
    files = dict[str, tuple[int | None, Sequence[str]]](head.files or {})
    if head.files is None:
        with _reports_damage(folder, FILES):
            content = read_files()
        if len(content) != sum(page.length for page in head.pages):
            raise _damage(folder, f"{FILES} does not match its hash")
        ends = accumulate(page.length for page in head.pages)
        for number, (page, end) in enumerate(zip(head.pages, ends, strict=True)):
            files |= head.page(number, content[end - page.length : end], folder)
    sizes = {name: size for name, (size, _) in files.items() if size is not None}
    return Manifest(head.state, head.block, {name: hashes for name, (_, hashes) in files.items()}, sizes)


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
            found = {_inside(name, folder): (sizes.get(name), hashes) for name, hashes in files.items()}
            pages = [_Page(sum(map(len, files.values())), 0, "")]
        head = _Head(_state(values["state"]), block, pages, found)
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


def _write_manifest(folder: Path, state: TrainState, facts: Mapping[str, Facts]) -> None:
    """Write the manifest durably. `facts` are those of each file, by name."""
    names = sorted(facts)
    pages = [{name: facts[name] for name in names[at : at + _PAGE]} for at in range(0, len(names), _PAGE)]
    lines = [json.dumps(page).encode() + b"\n" for page in pages]
    write_durably(folder / FILES, b"".join(lines))
    of_pages = [
        _Page(sum(len(hashes) for _, hashes in page.values()), len(line), _short_hash(line))
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
        raise _damage(folder, f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        place = name if error.filename is None else Path(error.filename).name
        raise _damage(folder, f"{place} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damage(folder, f"{name} is unreadable") from error


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
