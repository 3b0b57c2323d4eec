"""Reads the headers of the tensors in a Hugging Face folder. Needs no torch.

A folder is rejected if a file that its index names is missing, cut short, or does not contain its tensors.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.errors import DataError, Problem
from engine.files import copy
from engine.folders import real
from engine.readers import LARGE, open_regular, parse_object, read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
COPY_AGAIN = "copy the complete folder again from its source"
_SHOWN = 10  # problems
_LONGEST_HEADER = 100_000_000  # bytes, as in safetensors
_PIECE_BYTES = 1 << 24  # to compare at a time
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Header:
    """The location and type of a tensor: bytes start .. stop - 1 of `file`, `dtype` as in safetensors (BF16, F32)."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


def read_headers(folder: Path) -> dict[str, Header]:
    """Return the header of every tensor of a folder by name. Raises DataError if a file is missing or damaged."""
    if (folder / SINGLE).exists():
        return _headers_of(folder, SINGLE)
    if not (folder / INDEX).exists():
        # Tell the user which files the folder contains instead.
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if files:
            more = f" and {len(files) - 1} more" if len(files) > 1 else ""
            hint = f"copy the index from the same source; if one file contains the whole model, rename it to {SINGLE}"
            raise DataError(f"has {files[0]}{more}, but no {INDEX}", key=str(folder), hint=hint)
        pickled = any(folder.glob("*.bin"))
        hint = "save it with save_pretrained(..., safe_serialization=True)" if pickled else COPY_AGAIN
        raise DataError(f"has neither {SINGLE} nor {INDEX}", key=str(folder), hint=hint)
    try:
        index: dict[str, str] = read_object(folder / INDEX, LARGE, hint=COPY_AGAIN)["weight_map"]
        # Names with a folder are invalid: all files must be next to the index.
        valid = bool(index) and all(isinstance(file, str) and Path(file).name == file for file in index.values())
    except DataError as error:
        raise DataError(
            f"is not an index of safetensors files: it {error}", key=error.problems[0].key, hint=COPY_AGAIN
        ) from error
    except (OSError, KeyError, AttributeError):
        valid = False
    if not valid:
        raise DataError("is not an index of safetensors files", key=str(folder / INDEX), hint=COPY_AGAIN)
    files = sorted(set(index.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        problems = [Problem(f"shard {file} is missing", str(folder), COPY_AGAIN) for file in missing]
        raise error_of(problems, "missing shards")
    by_file = {file: _headers_of(folder, file) for file in files}
    problems = [
        Problem(f"{file} does not contain {name}", str(folder / INDEX), COPY_AGAIN)
        for name, file in index.items()
        if name not in by_file[file]
    ]
    found = dict[str, Header]()
    for file, headers in by_file.items():
        for name, header in headers.items():
            chosen = found.setdefault(name, by_file[index[name]].get(name, header) if name in index else header)
            # Programs that do not read the index take the last file with a tensor.
            if chosen != header and not _same_values(folder, chosen, header):
                message = f"{name} is in {chosen.file} and in {file}, with different values"
                problems.append(Problem(message, str(folder), COPY_AGAIN))
    if problems:
        raise error_of(problems, "tensors that are missing or stored twice")
    return found


def _same_values(folder: Path, one: Header, other: Header) -> bool:
    """Return whether two tensors of a folder have the same shape, dtype and bytes."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    with (folder / one.file).open("rb") as first, (folder / other.file).open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        sizes = (min(_PIECE_BYTES, one.stop - at) for at in range(one.start, one.stop, _PIECE_BYTES))
        return all(first.read(size) == second.read(size) for size in sizes)


def error_of(problems: list[Problem], what: str) -> DataError:
    """Create one error with the first ten problems and the number of the remaining ones.

    `what` is the plural noun for that number ("missing shards"). If consecutive problems have the same hint, only the
    first of them keeps it.
    """
    more = len(problems) - _SHOWN
    rest = [Problem(f"and {more} more {what}", problems[-1].key)] if more > 0 else []
    before = [None, *(problem.hint for problem in problems)]
    pairs = zip(problems[:_SHOWN], before, strict=False)
    return DataError.of([replace(one, hint=None if one.hint == last else one.hint) for one, last in pairs] + rest)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file of a Hugging Face folder, as `files.copy`. Raises DataError for a link, OSError if copying fails."""
    try:
        copy(source, target)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        hint = "put the file itself there: links are followed only in the cache of the Hugging Face hub"
        raise DataError("is a link, which could lead to any file", key=str(real(source)), hint=hint) from error


def _headers_of(folder: Path, file: str) -> dict[str, Header]:
    path = folder / file
    try:
        open_regular(path, hint=COPY_AGAIN).close()  # the library would wait for a named pipe
        with safe_open(path, framework="np"):  # checks the header and the length of the file
            begin, tensors = _read_header(path)
    except (SafetensorError, OSError) as error:
        raise _unreadable(path) from error
    return {
        name: Header(file, tuple(one["shape"]), one["dtype"], *(begin + at for at in one["data_offsets"]))
        for name, one in tensors.items()
    }


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Read the header of a safetensors file: eight bytes with its length, then JSON.

    Returns the offset at which the data of the tensors begins, and the JSON entry of each tensor by name.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(path.stat().st_size, _LONGEST_HEADER):
            raise DataError("has a header that is longer than it can be", key=str(path), hint=COPY_AGAIN)
        tensors = parse_object(file.read(length), str(path), hint=COPY_AGAIN)
    tensors.pop("__metadata__", None)
    return 8 + length, tensors


def _unreadable(path: Path) -> DataError:
    """Create the error for a file that safetensors cannot read. Finds the reason, which safetensors does not report."""
    hint = f"copy {path.name} again from its source"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return DataError("is a Git LFS pointer, not the file itself", key=str(path), hint="run `git lfs pull`")
        begin, tensors = _read_header(path)
        expected = begin + max(one["data_offsets"][1] for one in tensors.values())
    except OSError as error:
        return DataError(f"cannot be read: {error.strerror}", key=str(path), hint=hint)
    except (DataError, ValueError, KeyError, TypeError, IndexError):
        return DataError("is cut short in its header, or is not a safetensors file", key=str(path), hint=hint)
    if size == expected:
        return DataError("has an inconsistent header", key=str(path), hint=hint)
    how = "cut short" if size < expected else "too long"
    message = f"is {how}: {size:,} bytes, but its header says {expected:,}"
    return DataError(message, key=str(path), hint=hint)
