"""Harms a run that allows it (run.chaos=true), for `bytescale chaos` and for tests. Imports no torch."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from engine.config.units import counted, format_bytes
from engine.control.chaos import Fault, plant
from engine.control.progress import MOMENTS, PHASES
from engine.errors import CheckpointError, ConfigError, RunFolderError
from engine.files import append
from engine.job import Job
from engine.run.checkpoints import MANIFEST, newest_first
from engine.run.folder import RunFolder
from engine.run.status import config_of, status

_LARGEST_DISK = 16 << 30  # bytes; a larger one is not filled: other programs need it
_PIECES = (1 << 24, 1 << 12)  # bytes


def harm(run: Path, fault: Fault, rank: int) -> str:
    """Schedule a fault, or harm the run immediately; return a description. `fault.name` is one of
    `engine.control.chaos.FAULTS`.

    Raises ConfigError if the folder is not that of a run that allows it, or has no such rank or phase, or if it has
    finished.
    """
    config = config_of(run)
    if not config.run.chaos:
        hint = "only a run that was started with run.chaos=true may be harmed"
        raise ConfigError("does not allow chaos", key=str(run), hint=hint)
    folder = RunFolder(run)
    folder.chaos.mkdir(exist_ok=True)
    # These faults need no rank, so they happen immediately.
    if fault.name == "corrupt-checkpoint":
        return _corrupt(folder)
    if fault.name == "fill-disk":
        return _fill(folder)
    # A rank checks for its faults only at the phases that it reaches, so one that no rank can reach would wait forever.
    ranks = Job(config).cluster.ranks
    if not 0 <= rank < ranks:
        message, hint = f"is not among the {counted(ranks, 'rank')} of the run", f"for example --rank {ranks - 1}"
        raise ConfigError(message, key=f"--rank {rank}", hint=hint)
    moments = (*PHASES, *MOMENTS)
    if fault.at not in (None, *moments):
        raise ConfigError(
            "is not a phase of a step", key=f"--at {fault.at}", hint=f"choose one of {', '.join(moments)}"
        )
    if fault.at == "rename" and rank:
        raise ConfigError("is done by rank 0 alone", key="--at rename", hint="set --rank 0")
    if fault.at == "transfer" and config.parallel.pp == 1:
        hint = "choose a run whose parallel.pp is at least 2"
        raise ConfigError("is between the stages of a pipeline", key="--at transfer", hint=hint)
    state = status(run).state
    if state == "finished":
        raise ConfigError("has finished, so a fault would reach no rank", key=str(run), hint="choose another run")
    plant(folder.chaos, rank, fault)
    when = f" at {fault.at}" if fault.at else ""
    since = f" from step {fault.step} on" if fault.step else ""
    start = "" if state == "running" else "the run is not running, so it happens after the next start; "
    planted = f"{fault.name} is scheduled for rank {rank}{when}{since}"
    return f"{planted}; {start}{folder.chaos}/log.jsonl records when it happens"


def _corrupt(folder: RunFolder) -> str:
    """Flip a bit in the middle of the largest file of the newest checkpoint."""
    saved = newest_first(folder.checkpoints)
    if not saved:
        raise CheckpointError("has no checkpoint yet", key=str(folder.root))
    files = [path for path in saved[0].rglob("*") if path.is_file() and not path.is_symlink() and path.name != MANIFEST]
    largest = max(files, key=lambda path: (path.stat().st_size, path.name))
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return f"flipped a bit of {largest}"


def _fill(folder: RunFolder) -> str:
    """Allocate all free space on the disk of the run folder to a file in it."""
    disk, ballast, size = os.statvfs(folder.root), folder.chaos / "ballast", 0
    if disk.f_blocks * disk.f_frsize > _LARGEST_DISK:
        message = f"is on a disk of {format_bytes(disk.f_blocks * disk.f_frsize)}, which other programs may need"
        hint = f"put the run on a separate disk of at most {format_bytes(_LARGEST_DISK)}"
        raise RunFolderError(message, key=str(folder.root), hint=hint)
    with append(ballast) as file:
        size = ballast.stat().st_size
        for piece in _PIECES:
            try:
                while True:
                    os.posix_fallocate(file.fileno(), size, piece)
                    size += piece
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
    return f"filled the disk with {format_bytes(size)}; remove {ballast} to free it"
