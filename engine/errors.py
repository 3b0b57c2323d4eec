"""Error types: each has an exit code, and names the place of the error and a way to fix it.

The command line prints every error and exits with its code; no other layer does either.
"""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from traceback import extract_tb
from typing import Any, TypeVar

E = TypeVar("E", bound="BytescaleError")

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.ELOOP)  # the last: a link that another user may have made
_NO_PATH = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO)
_SHARED_MEMORY = "/dev/shm"  # semaphores, and NCCL's buffers between the GPUs of a host
_ON_DEVICE = ("cuda error: out of memory", "cuda out of memory", "_status_alloc_failed", "cuda failure 2 ")
_ON_HOST = ("can't allocate memory", "not enough memory", "cannot allocate memory", "bad_alloc", "out of memory")
_NO_SEGMENT = "failed to map segment from shared object"
_SAID = 200  # characters of a library's message
# What CUDA, and NCCL that passes it on, say when a GPU or its link fails: cudaErrorECCUncorrectable, ErrorContained,
# ErrorNvlinkUncorrectable; Xid 79, after which calls return cudaErrorLaunchFailure, as some bugs of kernels do.
_BROKEN = (
    *("uncorrectable ecc", "uncorrectable nvlink", "over nvlink or a hardware error", "unspecified launch failure"),
    *("fallen off the bus", "gpu is lost"),
)
_SEMAPHORE, _SEGMENT = 1 << 12, 16 << 20  # bytes of either, at most


class ExitCode(IntEnum):
    """Exit codes. Schedulers and scripts rely on them."""

    OK = 0
    USAGE = 2
    PREFLIGHT = 3
    DATA = 4
    NO_CHECKPOINT = 5
    MEMORY = 10
    BUG = 70
    RUN_FOLDER = 73
    STORAGE = 74
    PREEMPTED = 75
    STUCK = 93  # the same step failed three times
    HANG = 124
    INTERRUPTED = 130  # 128 + SIGINT, as shells count


@dataclass(frozen=True)
class Problem:
    """One mistake of the user."""

    message: str
    key: str | None = None  # the place: a config key or `file:line`
    hint: str | None = None  # how to fix it


class BytescaleError(Exception):
    """Base class of our errors. Subclasses set the exit code."""

    code: ExitCode = ExitCode.BUG
    traced: bool = False  # True if a traceback was written to the file that `key` names
    found: Mapping[str, Any] = {}  # results before the failure, for the command's JSON output

    def __init__(self, message: str, *, key: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.problems: tuple[Problem, ...] = (Problem(message, key, hint),)

    @classmethod
    def of(cls: type[E], problems: list[Problem]) -> E:
        """Make one error that reports all `problems`, of which there must be at least one."""
        first = problems[0]
        error = cls(first.message, key=first.key, hint=first.hint)
        error.problems = tuple(problems)
        return error


class ConfigError(BytescaleError):
    """Wrong usage or config. Reports all problems, not only the first."""

    code = ExitCode.USAGE


class DataError(BytescaleError):
    """Documents are missing, unreadable, malformed, or differ from the documents that the run started with."""

    code = ExitCode.DATA


class MemoryFitError(BytescaleError):
    """The configuration does not fit the memory of a device or of its host."""

    code = ExitCode.MEMORY


class CheckpointError(BytescaleError):
    """No usable checkpoint: it is missing, damaged, or does not suit the config."""

    code = ExitCode.NO_CHECKPOINT


class RunFolderError(BytescaleError):
    """The run folder cannot be used: it is in use, not writable, overlaps the data, or contains other files."""

    code = ExitCode.RUN_FOLDER


class StorageError(BytescaleError):
    """The disk is full, reading or writing failed or is not permitted, or a file is damaged."""

    code = ExitCode.STORAGE


class PreflightError(BytescaleError):
    """A machine failed a check: too few GPUs, a PyTorch without CUDA, a host without ssh, timings that do not fit."""

    code = ExitCode.PREFLIGHT


class HostError(PreflightError):
    """A host is not as it must be. The message names it, whichever rank has found out."""


class PlanError(BytescaleError):
    """A plan is invalid, or differs between ranks; this is a bug.

    `rule` is the number of the broken rule in planner/proof/verify.py; 0 for any other check.
    """

    def __init__(self, rule: int, message: str) -> None:
        super().__init__(message)
        self.rule = rule

    def __reduce__(self) -> tuple[type[PlanError], tuple[int, str]]:
        """Make the error picklable, because it is raised in the planning process."""
        return PlanError, (self.rule, str(self))


def storage_error(error: BaseException) -> StorageError | None:
    """Convert an OSError of a full or failing disk, or of a path without permission, and any error of full /dev/shm.

    None for any other error.
    """
    text = str(error)
    # NCCL's, in a RuntimeError; older ones do not say why they could not create a segment.
    if f"{_SHARED_MEMORY}/nccl" in text and ("No space left" in text or _lacks(_SEGMENT)):
        return _full_shared_memory()
    if not isinstance(error, OSError):
        return None
    place = None if error.filename is None else str(error.filename)
    if error.errno == errno.ENOSPC and place is None and _lacks(_SEMAPHORE):  # Python names no file for a semaphore
        return _full_shared_memory()
    if error.errno in _DISK:
        return StorageError(os.strerror(error.errno), key=place, hint="free some space, or write to another disk")
    if error.errno == errno.EROFS:
        return StorageError(os.strerror(error.errno), key=place, hint="choose a folder that you can write to")
    if error.errno in _FORBIDDEN and place is not None:  # without a path it is not about a file
        hint = f"`namei -l {shlex.quote(place)}` shows the permissions of this path and of its folders"
        return StorageError(os.strerror(error.errno), key=place, hint=hint)
    return None


def path_error(error: BaseException) -> ConfigError | None:
    """Convert an OSError of a path that names no file, such as one of 300 characters. None for any other error."""
    if isinstance(error, OSError) and error.errno in _NO_PATH and error.filename is not None:
        place = str(error.filename)
        place = place if len(place) <= _SAID else f"{place[:_SAID]}..."
        return ConfigError(os.strerror(error.errno), key=place, hint="choose another path")
    return None


def memory_error(error: BaseException) -> MemoryFitError | None:
    """Convert the errors with which Python and libraries report that memory has run out, of a device or of the host.

    None for any other error.
    """
    text = str(error).strip()
    said = text.splitlines()[0][:_SAID] if text else ""
    if type(error).__name__ == "OutOfMemoryError" or (isinstance(error, RuntimeError) and _signs(text, _ON_DEVICE)):
        return MemoryFitError(f"out of memory: {said}", key="capacity", hint="set a smaller capacity")
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        hint = "`ulimit -u` and pids.max of the control group limit their number; free some memory"
        return MemoryFitError("out of memory, or of threads: no thread can be started", hint=hint)
    of_host = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if isinstance(error, (OSError, ImportError)):  # the loader of shared libraries names no errno
        before = error.__cause__ or error.__context__
        of_host = of_host or any(_NO_SEGMENT in str(one) for one in (error, before))
    if not (of_host or (isinstance(error, RuntimeError) and _signs(text, _ON_HOST))):
        return None
    where = error.__traceback__ and [frame.filename for frame in extract_tb(error.__traceback__)]
    module = next((name for name in reversed(where or ()) if f"{os.sep}engine{os.sep}" in name), "")
    place = f" in engine{module.rpartition(f'{os.sep}engine')[2]}" if module else ""
    message = f"out of memory: the host's is full{place}{f' ({said})' if said else ''}"
    hint = "free some, or choose smaller values: capacity, batch_tokens, fewer ranks or loaders on a host"
    return MemoryFitError(message, hint=hint)


def broken_gpu(text: str, gpu: str) -> Problem | None:
    """Return the problem if the text of an error says that a GPU has failed; `gpu` names it. None otherwise."""
    line = next((line.strip()[:_SAID] for line in text.splitlines() if _signs(line, _BROKEN)), None)
    if line is None:
        return None
    hint = (
        "look for Xid in its kernel log (`dmesg`), and at `nvidia-smi -q`; to continue without this host, leave it out"
    )
    return Problem(f"{gpu} has failed: {line}", hint=f"{hint} of the hostfile and resume")


def _signs(text: str, signs: tuple[str, ...]) -> bool:
    return any(sign in text.lower() for sign in signs)


def _lacks(size: int) -> bool:
    """Return whether the shared memory of this host has fewer than `size` bytes left."""
    with suppress(OSError):  # there is none
        found = os.statvfs(_SHARED_MEMORY)
        return found.f_bavail * found.f_frsize < size
    return False


def _full_shared_memory() -> StorageError:
    hint = "remove files of ended processes there, or enlarge it: docker run --shm-size=16g, or mount -o remount"
    return StorageError("the shared memory of this host is full", key=_SHARED_MEMORY, hint=hint)
