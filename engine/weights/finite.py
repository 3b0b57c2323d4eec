"""Finds NaN and infinity in weights. One such value makes every loss NaN, and its cause would be hard to find."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import DataError
from engine.weights.folder import COPY_AGAIN, Header

STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_PIECE_BYTES = 1 << 24
_NAMED = 3


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor, which must not be empty, contains neither NaN nor infinity."""
    # If any value is not finite, the minimum or the maximum is not. They take a tenth of the time of `isfinite`.
    return all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))


def not_finite(path: Path, headers: Iterable[tuple[str, Header]]) -> list[str]:
    """Return the names of those tensors of a file that contain NaN or infinity.

    `path` is a safetensors file, `headers` are the names and headers of its tensors. Tensors of a dtype that is not in
    `STORED` are skipped. Reads 16 MiB at a time.
    """
    names = []
    with path.open("rb") as file:  # not memory-mapped: mapped pages would count as memory of this process
        for name, header in headers:
            if header.dtype not in STORED:
                continue
            file.seek(header.start)
            for at in range(header.start, header.stop, _PIECE_BYTES):
                piece = bytearray(min(_PIECE_BYTES, header.stop - at))
                file.readinto(piece)
                if not is_finite(torch.frombuffer(piece, dtype=STORED[header.dtype])):
                    names.append(name)
                    break
    return names


def not_finite_error(names: list[str], folder: Path) -> DataError:
    """Create the error for tensors `names` of a folder that contain NaN or infinity; it names the first three."""
    more = f" and {len(names) - _NAMED} more tensors" if len(names) > _NAMED else ""
    message = f"NaN or infinity in {', '.join(names[:_NAMED])}{more}"
    return DataError(message, key=str(folder), hint=f"{COPY_AGAIN}, or use other weights: training cannot repair these")
