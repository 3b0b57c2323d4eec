"""A Hugging Face folder that is whole or not there: written beside its place, synced, renamed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import ConfigError, StorageError
from engine.files import sync
from engine.weights.config_json import CONFIG
from engine.weights.folder import INDEX, SINGLE

_LOCK = ".lock"


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its name and bytes, and how to get it when its turn comes."""

    name: str
    bytes: int
    read: Callable[[], Tensor]


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a folder to write into that becomes `out` when all its files are on disk; if anything fails nothing stays.

    So it is when SIGTERM or a closed terminal stops it, which then looks like Ctrl-C. A kill leaves `.writing-NAME`
    beside `out`, which the next writer of `out` takes over. Raises ConfigError if `out` is there, not empty, cannot be
    made, or is being written by another process.
    """
    _refuse_existing(out)
    draft = out.absolute().with_name(f".writing-{out.absolute().name}")
    with _stops_raised(), _owned(draft, out):
        try:
            for left in draft.iterdir():
                if left.name != _LOCK:
                    left.unlink()
            yield draft
            for path in [*draft.iterdir(), draft]:
                sync(path)
            _refuse_existing(out)
            draft.rename(out)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        (out / _LOCK).unlink()  # not before: whoever made a new one would own the draft too
        sync(out)
        sync(out.absolute().parent)


def _refuse_existing(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise ConfigError(f"{out} is there already", key="--out", hint="name a folder that does not exist yet")


@contextmanager
def _owned(draft: Path, out: Path) -> Iterator[None]:
    """Make a draft if need be, and hold its lock; the system frees it when this process ends, however."""
    try:
        draft.mkdir(parents=True, exist_ok=True)
        lock = (draft / _LOCK).open("w")
    except OSError as error:
        hint = "name a folder where you may write"
        raise ConfigError(f"{out} cannot be written: {error.strerror}", key="--out", hint=hint) from error
    with lock:
        if not _locked(lock, draft):
            hint = "wait for it, or name another folder"
            raise ConfigError(f"another process is writing {out}", key="--out", hint=hint)
        yield


def _locked(lock: IO[str], draft: Path) -> bool:
    """Lock a draft's file; return whether nobody else had it, or has just given the draft its name."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock.fileno()), (draft / _LOCK).stat())
    except (BlockingIOError, FileNotFoundError):
        return False


@contextmanager
def _stops_raised() -> Iterator[None]:
    """Raise KeyboardInterrupt for what would end this process without cleaning up; what is ignored stays so (nohup)."""
    stops = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in stops:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in stops:
            signal.signal(number, signal.SIG_DFL)


def write_weights(draft: Path, config: Mapping[str, Any], entries: Sequence[Entry], shard_bytes: int) -> list[str]:
    """Write tensors in shards of at most `shard_bytes` (but one tensor at least), with index and config.json.

    Returns the names of the shards. Memory: the tensors of one shard. Raises StorageError when the disk is full.
    """
    shards = _shards(entries, shard_bytes)
    files = [SINGLE] if len(shards) == 1 else [_name(number, len(shards)) for number in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        _save(shard, draft / file)
    if len(shards) > 1:
        weight_map = {one.name: file for file, shard in zip(files, shards, strict=True) for one in shard}
        size = sum(entry.bytes for entry in entries)
        _write_json(draft / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    _write_json(draft / CONFIG, config)  # last: without it nobody takes the folder for a whole one
    return files


def _shards(entries: Sequence[Entry], most: int) -> list[list[Entry]]:
    """Return the tensors in their order, cut into shards of at most `most` bytes."""
    shards: list[list[Entry]] = []
    left = 0
    for entry in entries:
        if not shards or entry.bytes > left:
            shards.append([])
            left = most
        shards[-1].append(entry)
        left -= entry.bytes
    return shards


def _name(number: int, of: int) -> str:
    return f"model-{number + 1:05d}-of-{of:05d}.safetensors"


def _save(shard: Sequence[Entry], path: Path) -> None:
    try:
        save_file({entry.name: entry.read() for entry in shard}, path, metadata={"format": "pt"})
    except SafetensorError as error:  # it hides the OSError
        raise StorageError(f"{path.name} could not be written: {error}", key="--out", hint="free some space") from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets nobody but the owner read


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
