"""A Hugging Face folder's tensors by name, from the headers of its files alone; no torch here.

A folder that is not whole is refused: a shard that its index names and that is not there, one that is cut short, a
tensor that its shard does not hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.errors import DataError, Problem

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHOWN = 10  # mismatches that are told one by one
WAY_OUT = "copy the folder again, whole, from where it came"
_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Header:
    """What a file says of a tensor; `dtype` as safetensors spells it: BF16, F32; `start` and `stop` are its bytes."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


def read_headers(folder: Path) -> dict[str, Header]:
    """Return every tensor of a folder, in the order of its files. Raises DataError with all that is missing in it."""
    if (folder / SINGLE).exists():
        return _of_file(folder, SINGLE)
    if not (folder / INDEX).exists():
        raise _no_weights(folder)
    index = _read_index(folder / INDEX)
    files = sorted(set(index.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        problems = [Problem(f"shard {file} is missing", str(folder), WAY_OUT) for file in missing]
        raise told(problems, "missing shards")
    found = {name: header for file in files for name, header in _of_file(folder, file).items()}
    lost = [f"{file} does not hold {name}" for name, file in index.items() if _file(found.get(name)) != file]
    if lost:
        problems = [Problem(text, str(folder / INDEX), WAY_OUT) for text in lost]
        raise told(problems, "tensors that their shards do not hold")
    return found


def told(problems: list[Problem], what: str) -> DataError:
    """Return one error that tells the first ten problems, and how many more of `what` there are.

    A way out that several share in a row is told once.
    """
    more = len(problems) - SHOWN
    rest = [Problem(f"and {more} more {what}", problems[-1].key)] if more > 0 else []
    before = [None, *(problem.hint for problem in problems)]
    pairs = zip(problems[:SHOWN], before, strict=False)
    return DataError.of([replace(one, hint=None if one.hint == last else one.hint) for one, last in pairs] + rest)


def _no_weights(folder: Path) -> DataError:
    """Return the refusal of a folder that has neither the one file nor an index: other files of weights tell why."""
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if files:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        hint = f"copy it too from where they came; one file that holds the whole model is called {SINGLE}"
        return DataError(f"{INDEX} is missing beside {files[0]}{more}", key=str(folder), hint=hint)
    hint = "save it with save_pretrained(..., safe_serialization=True)" if any(folder.glob("*.bin")) else WAY_OUT
    return DataError(f"there is neither {SINGLE} nor {INDEX}", key=str(folder), hint=hint)


def _file(header: Header | None) -> str | None:
    return header.file if header else None


def _read_index(path: Path) -> Mapping[str, str]:
    """Return the index's map from a tensor to its file, which lies in the same folder."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        sound = bool(files) and all(isinstance(file, str) and Path(file).name == file for file in files.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise DataError("is no index of safetensors files", key=str(path), hint=WAY_OUT)
    return dict(files)


def _of_file(folder: Path, file: str) -> dict[str, Header]:
    path = folder / file
    try:
        with safe_open(path, framework="np"):  # it checks that the header is sound and the file as long as it says
            begin, tensors = _header(path)
    except (SafetensorError, OSError) as error:
        raise _unsound(path) from error
    return {
        name: Header(file, tuple(one["shape"]), one["dtype"], *(begin + at for at in one["data_offsets"]))
        for name, one in tensors.items()
    }


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the tensors begin in a file, and its header: eight bytes of length, then JSON."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        tensors: dict[str, Any] = json.loads(file.read(length))
    tensors.pop("__metadata__", None)
    return 8 + length, tensors


def _unsound(path: Path) -> DataError:
    """Return the refusal of a file that safetensors cannot read, with what is wrong with it."""
    hint = f"copy {path.name} again from where it came"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(len(_POINTER)) == _POINTER:
                return DataError("is a pointer of Git LFS, not the file", key=str(path), hint="run `git lfs pull`")
        begin, tensors = _header(path)
        whole = begin + max(one["data_offsets"][1] for one in tensors.values())
    except OSError as error:
        return DataError(f"cannot be read: {error.strerror}", key=str(path), hint=hint)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return DataError("is cut short in its header, or no safetensors file", key=str(path), hint=hint)
    if size == whole:
        return DataError("has a header that contradicts itself", key=str(path), hint=hint)
    how = "cut short" if size < whole else "too long"
    return DataError(f"is {how}: {size:,} bytes, where its header says {whole:,}", key=str(path), hint=hint)
