"""Checks folders: space, fsync, atomic renames, file locks, and whether a damaged checkpoint is detected."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from engine.config.schema import Config
from engine.config.units import format_bytes
from engine.control.control import Control
from engine.cost.sizes import element_bytes, optimizer_tensors, parameters
from engine.doctor.check import Check, failed, ok, warning
from engine.errors import CheckpointError
from engine.files import LOCK, locked, write_durably
from engine.folders import random_name, temporary
from engine.run import checkpoints, saved
from engine.run.checkpoints import Range, Share, TrainState

PREFIX = ".bytescale-doctor-"
_FILE_BYTES = 1 << 20
_SLOW_S = 2.0  # to write and sync _FILE_BYTES: a checkpoint of 1 GiB would take half an hour
_CACHE_BYTES = 1 << 30  # free space below which packed documents soon fill a disk
_LOCKED = 3
# A separate process: on NFS a second lock of the same process does not conflict.
_TAKE_LOCK = f"""
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit({_LOCKED})
"""


def nearest(folder: Path) -> Path:
    """Return the folder, or the nearest of its parents that exists: the doctor creates none of them."""
    folder = Path(os.path.realpath(folder))
    return next(path for path in (folder, *folder.parents) if path.exists())


def checkpoint_bytes(config: Config) -> int:
    """About the size of a checkpoint: weights, and the optimizer's values in fp32."""
    return parameters(config.model) * (element_bytes(config.dtype)[0] + 4 * optimizer_tensors(config.optimizer))


def run_folder(config: Config) -> Check:
    """Check the folder of the run, which must hold one checkpoint more than are kept: the next is written first."""
    one = checkpoint_bytes(config)
    all_ = one * (1 + config.run.keep_checkpoints)
    kept = f"{config.run.keep_checkpoints} checkpoints and the next of {format_bytes(one)} each"
    return _folder("run folder", Path(config.run.out), "run.out", (one, "a checkpoint"), (all_, kept))


def data_cache(folder: Path) -> Check:
    """Check the folder in which tokens of documents are kept."""
    return _folder("data cache", folder, "data.cache", (1, "a file"), (_CACHE_BYTES, "documents"))


def _folder(name: str, folder: Path, key: str, least: tuple[int, str], good: tuple[int, str]) -> Check:
    """Check a folder that the config names with `key`.

    `least` and `good` are bytes, and what needs them: with fewer than `least` free the check fails, with fewer than
    `good` it warns.
    """
    place, elsewhere = nearest(folder), f"choose a folder on another disk with {key}=DIR"
    try:
        free = shutil.disk_usage(place).free
        value = f"{format_bytes(free)} free"
        if free < least[0]:
            message = f"{place} has {value}, but {least[1]} takes {format_bytes(least[0])}"
            return failed(name, message, f"free some space, or {elsewhere}", value)
        with temporary(place, PREFIX) as made:
            began = time.monotonic()
            for _ in range(2):  # the second one replaces the first
                write_durably(made / "file", os.urandom(_FILE_BYTES))
            seconds = (time.monotonic() - began) / 2
            # A second process tries to take the lock. On a file system without locks it succeeds.
            lock = made / LOCK
            with locked(lock):
                other = subprocess.run([sys.executable, "-I", "-S", "-c", _TAKE_LOCK, lock], capture_output=True)
    except OSError as error:
        what = "a file cannot be renamed" if error.filename2 is not None else "a file cannot be written and synced"
        hint = f"check `namei -l {place}` and how it is mounted, or {elsewhere}"
        return failed(name, f"{place}: {what}: {error.strerror}", hint, error.strerror)
    # Failures come before warnings, which are about space and speed.
    if other.returncode != _LOCKED:
        message = f"{place}: locks do not exclude other processes, so two runs could write the same folder"
        return failed(name, message, f"mount it with locks (NFS: not nolock), or {elsewhere}", "locks have no effect")
    if free < good[0]:
        message = f"{place} has {value}, but {good[1]} need about {format_bytes(good[0])}"
        return warning(name, message, f"free some space, or {elsewhere}", value)
    took = f"{format_bytes(_FILE_BYTES)} written, synced and renamed in {seconds:.2g} s"
    if seconds > _SLOW_S:
        return warning(name, f"{place} is slow: {took}", elsewhere, f"{value}, {seconds:.2g} s")
    return ok(name, f"{place} has {value}; {took}", value)


def checkpoint(config: Config) -> Check:
    """Write two tiny checkpoints near the run folder, damage the newer one, and check that the older one is chosen."""
    name, place = "checkpoint", nearest(Path(config.run.out))
    with temporary(place, PREFIX) as folder:
        older, newer = (_write(folder, step) for step in (1, 2))
        state = checkpoints.read(newer)
        lost, tensors = "do not use this disk for runs", newer / "tensors"
        if state.step != 2 or saved.choose(folder, lambda line: None) != newer:
            return failed(name, f"{place}: a checkpoint that was just written is not the one that is read", lost)
        content = bytearray(tensors.read_bytes())
        content[len(content) // 2] ^= 1
        tensors.write_bytes(content)
        try:
            checkpoints.read(newer)
        except CheckpointError:
            pass
        else:
            return failed(name, f"{place}: a flipped bit in a checkpoint was not detected", lost)
        if saved.choose(folder, lambda line: None) != older:
            return failed(name, f"{place}: the intact checkpoint was not chosen in place of the damaged one", lost)
    return ok(
        name,
        "written, verified and damaged; the damage was detected, and the older checkpoint was chosen",
        "damage noticed",
    )


def _write(folder: Path, step: int) -> Path:
    state = TrainState(step, cursor={}, ranks=1, fingerprints={}, must_match={})

    def save(draft: Path, share: Share) -> list[Range]:
        (draft / "tensors").write_bytes(os.urandom(4096))
        return [Range("tensors", 0, 4096)]

    return checkpoints.write(folder, state, 0, save, random_name(), Control(0))
