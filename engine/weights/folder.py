"""A Hugging Face folder's tensors by name, from the headers of its files alone; no torch here.

A folder that is not whole is refused: a shard that its index names and that is not there, one that is cut short, a
tensor that its shard does not hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.errors import DataError, Problem

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHOWN = 10  # mismatches that are told one by one
_WAY_OUT = "copy the folder again, whole, from where it came"


@dataclass(frozen=True)
class Header:
    """What a file says of a tensor; `dtype` as safetensors spells it: BF16, F32."""

    file: str
    shape: tuple[int, ...]
    dtype: str


def read_headers(folder: Path) -> dict[str, Header]:
    """Return every tensor of a folder, in the order of its files. Raises DataError with all that is missing in it."""
    if (folder / SINGLE).exists():
        return _of_file(folder, SINGLE)
    if not (folder / INDEX).exists():
        hint = "save it with save_pretrained(..., safe_serialization=True)" if any(folder.glob("*.bin")) else _WAY_OUT
        raise DataError(f"there is neither {SINGLE} nor {INDEX}", key=str(folder), hint=hint)
    index = _read_index(folder / INDEX)
    files = sorted(set(index.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise told([Problem(f"shard {file} is missing", str(folder), _WAY_OUT) for file in missing])
    found = {name: header for file in files for name, header in _of_file(folder, file).items()}
    lost = [f"{file} does not hold {name}" for name, file in index.items() if _file(found.get(name)) != file]
    if lost:
        raise told([Problem(text, str(folder), _WAY_OUT) for text in lost])
    return found


def told(problems: list[Problem]) -> DataError:
    """Return one error that tells the first ten problems, and how many more there are."""
    more = len(problems) - SHOWN
    rest = [Problem(f"and {more} more", problems[0].key)] if more > 0 else []
    return DataError.of(problems[:SHOWN] + rest)


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
        raise DataError("is no index of safetensors files", key=str(path), hint=_WAY_OUT)
    return dict(files)


def _of_file(folder: Path, file: str) -> dict[str, Header]:
    try:
        with safe_open(folder / file, framework="np") as shard:
            slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 (it is no mapping)
            return {name: Header(file, tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except (SafetensorError, OSError) as error:
        raise DataError("is cut short, or no safetensors file", key=str(folder / file), hint=_WAY_OUT) from error
