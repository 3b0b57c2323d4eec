"""Writes a Hugging Face folder. A failure leaves no folder, never an incomplete one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import ConfigError, StorageError
from engine.files import sync
from engine.folders import drafting
from engine.weights.config_json import CONFIG
from engine.weights.folder import INDEX, SINGLE


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its name in the files, its size in bytes, and a function that reads it when it is written."""

    name: str
    bytes: int
    read: Callable[[], Tensor]


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder to write to. At the end of the context its files are synced to disk and it is renamed to
    `out`; after an error it is removed.

    SIGTERM and a closed terminal count as errors too: they raise KeyboardInterrupt, as Ctrl-C does. Only SIGKILL leaves
    the temporary folder, which the next call for the same `out` removes. The path that is yielded leads there whatever
    others rename meanwhile, and is valid in this process only. Raises ConfigError if `out` exists and is not empty,
    cannot be created, or is being written by another process.
    """
    _refuse_existing(out)
    with ExitStack() as stack:
        # By default these signals end the process before it can remove the folder. A signal that is ignored (SIGHUP
        # with nohup), or that the caller handles, is not changed.
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:
                stack.callback(signal.signal, number, signal.SIG_DFL)
                signal.signal(number, signal.default_int_handler)
        try:
            draft = stack.enter_context(drafting(out.absolute()))
        except BlockingIOError as error:
            hint = "wait until it is done, or choose another folder"
            raise ConfigError(f"another process is writing {out}", key="--out", hint=hint) from error
        except OSError as error:
            hint = "choose a folder that you can write to"
            raise ConfigError(f"cannot write {out}: {error.strerror}", key="--out", hint=hint) from error
        yield draft.path
        for path in draft.path.iterdir():
            sync(path)
        _refuse_existing(out)
        draft.publish()


def _refuse_existing(out: Path) -> None:
    """Raise ConfigError if `out` exists, unless it is an empty folder."""
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise ConfigError(f"{out} already exists", key="--out", hint="choose a folder that does not exist yet")


def write_weights(draft: Path, config: Mapping[str, Any], entries: Sequence[Entry], shard_bytes: int) -> list[str]:
    """Write tensors to files of at most `shard_bytes` in the folder `draft`, with their index and config.json.

    Returns the names of the tensor files. A tensor larger than `shard_bytes` gets a separate file. The tensors of one
    file are in memory at a time. `config` is the content of config.json. Raises StorageError if writing fails.
    """
    shards: list[list[Entry]] = []
    left = 0
    for entry in entries:
        if not shards or entry.bytes > left:
            shards.append([])
            left = shard_bytes
        shards[-1].append(entry)
        left -= entry.bytes
    count = len(shards)
    files = [SINGLE] if count == 1 else [f"model-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]
    for file, shard in zip(files, shards, strict=True):
        try:
            save_file({entry.name: entry.read() for entry in shard}, draft / file, metadata={"format": "pt"})
        except SafetensorError as error:  # safetensors hides the OSError
            raise StorageError(f"cannot write {file}: {error}", key="--out", hint="free some space") from error
        # safetensors makes files readable by the owner only. No other user can reach the draft and put a link there.
        (draft / file).chmod(draft.stat().st_mode & 0o666)
    if count > 1:
        weight_map = {entry.name: file for file, shard in zip(files, shards, strict=True) for entry in shard}
        size = sum(entry.bytes for entry in entries)
        _write_json(draft / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    _write_json(draft / CONFIG, config)  # last, so that an incomplete folder has no config.json
    return files


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
