"""Weights that are numbers: one NaN makes every loss NaN, and nobody would look for it in the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import DataError
from engine.weights.folder import WAY_OUT, Header

STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PIECE_BYTES = 1 << 24
_NAMED = 3


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor holds neither NaN nor infinity; the bounds carry both, and cost a tenth of isfinite."""
    return all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))


def not_finite(path: Path, headers: Iterable[tuple[str, Header]]) -> list[str]:
    """Return the names of a file's tensors that hold NaN or infinity. Memory: a piece of a tensor."""
    floats = [(name, header) for name, header in headers if header.dtype in STORED]
    return [name for name, header in floats if not all(map(is_finite, _pieces(path, header)))]


def refusal(names: list[str], folder: Path) -> DataError:
    """Return the refusal of a folder in which the tensors `names` are not finite."""
    more = f" and {len(names) - _NAMED} more tensors" if len(names) > _NAMED else ""
    message = f"NaN or infinity in {', '.join(names[:_NAMED])}{more}"
    return DataError(message, key=str(folder), hint=f"{WAY_OUT}, or take others: no training mends these")


def _pieces(path: Path, header: Header) -> Iterator[Tensor]:
    """Yield a tensor's numbers as they are read: a mapped file would count as this process's memory."""
    with path.open("rb") as file:
        file.seek(header.start)
        for at in range(header.start, header.stop, _PIECE_BYTES):
            piece = bytearray(min(_PIECE_BYTES, header.stop - at))
            file.readinto(piece)
            yield torch.frombuffer(piece, dtype=STORED[header.dtype])
