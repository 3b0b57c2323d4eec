"""Token files for tests: laid out by hand as Megatron's tools lay them out, or written by ours."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from engine.data.token_file import TokenWriter

CODES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}


def megatron(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: type = np.uint16) -> Path:
    """Write documents of several sequences each."""
    sequences = [np.array(one, dtype=dtype) for document in documents for one in document]
    lengths = [len(one) for one in sequences]
    offsets = [sum(one.nbytes for one in sequences[:number]) for number in range(len(sequences))]
    first = np.cumsum([0, *(len(document) for document in documents)])
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype]))
        file.write(struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(first)))
        file.write(np.array(lengths, dtype=np.int32).tobytes() + np.array(offsets, dtype=np.int64).tobytes())
        file.write(first.astype(np.int64).tobytes())
    Path(f"{prefix}.bin").write_bytes(b"".join(one.tobytes() for one in sequences))
    return prefix


def written(
    prefix: Path,
    documents: Sequence[Sequence[int]],
    dtype: type = np.uint16,
    masks: Sequence[Sequence[bool] | None] | None = None,
) -> Path:
    """Write documents of one sequence each, and their masks; None counts all tokens, of a document or of all."""
    with TokenWriter(prefix, dtype) as writer:
        for one, mask in zip(documents, masks or [None] * len(documents), strict=True):
            writer.add(np.array(one, dtype=np.int64), None if mask is None else np.array(mask, dtype=np.bool_))
    return prefix
