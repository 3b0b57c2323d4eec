"""Token files in Megatron-LM's format: the tokens of all documents in `PREFIX.bin`, where they are in `PREFIX.idx`.

```
 PREFIX.idx   MMIDIDX\\0\\0 | version: 8 bytes | dtype: 1 | sequences S: 8 | boundaries D + 1: 8
              | lengths of the sequences in tokens: int32 [S] | their offsets in PREFIX.bin in bytes: int64 [S]
              | the first sequence of each document, and S: int64 [D + 1] | modes: int8 [S], only in multimodal files
```
All numbers are little-endian. Megatron's tools write one sequence per document, or one per sentence. Source:
megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM.

Letters: D documents, S sequences, T tokens.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from engine.data.sources.files import kind, unreadable
from engine.errors import DataError
from engine.files import sync
from engine.units import Ints

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are float64, float32
_LEAST_INT32 = 65500  # vocabularies of this size have int32 tokens, smaller ones uint16, as in Megatron's tools
_MOST_TOKENS = 2**31 - 1  # of a sequence, whose length is an int32


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The documents of a token file, memory-mapped: opening it takes the same time for any number of documents."""

    prefix: Path
    tokens: NDArray[np.integer]  # [T]
    offsets: Ints  # [S] where each sequence begins in the file, in bytes
    first: Ints  # [D + 1] the first sequence of each document, and S

    def __len__(self) -> int:
        return len(self.first) - 1

    def lengths(self, documents: Ints | slice) -> Ints:
        """Return the number of tokens of some documents: int64 [n]."""
        starts, stops = self.first[:-1][documents], self.first[1:][documents]
        return self._begin(stops) - self._begin(starts)

    def read(self, document: int, start: int, stop: int) -> Ints:
        """Return tokens start .. stop - 1 of a document: int64, fewer if the document is shorter."""
        begin, end = self._begin(self.first[document : document + 2]).tolist()
        return self.tokens[min(begin + start, end) : min(begin + stop, end)].astype(np.int64)

    def _begin(self, sequences: Ints) -> Ints:
        """Return where some sequences begin in `tokens`; sequence S begins at the end."""
        found = np.full(len(sequences), len(self.tokens), dtype=np.int64)
        inside = sequences < len(self.offsets)
        found[inside] = self.offsets[sequences[inside]] // self.tokens.itemsize
        return found

    @classmethod
    def open(cls, prefix: Path) -> TokenFile:
        """Open PREFIX.idx and PREFIX.bin. Raises DataError if a file is missing, damaged, or does not fit the other."""
        index, content = (Path(f"{prefix}{ending}") for ending in (".idx", ".bin"))
        mapped, raw = _map(index), _map(content)
        hint = "write both files again, for example with `bytescale data pack`"
        if len(mapped) < _HEADER.size or bytes(mapped[: len(_MAGIC)]) != _MAGIC:
            raise DataError("is not an index of a token file in Megatron's format", key=str(index), hint=hint)
        _, version, code, sequences, boundaries = _HEADER.unpack(mapped[: _HEADER.size].tobytes())
        if version != 1 or code not in _DTYPES:
            message = f"has version {version} and dtype {code}; supported are version 1 and integers"
            raise DataError(message, key=str(index), hint=hint)
        size = _HEADER.size + 12 * sequences + 8 * boundaries
        if len(mapped) not in (size, size + sequences) or boundaries < 1:  # with modes, or without
            message = f"has {len(mapped):,} bytes, but its header says {size:,}: it was cut off or changed"
            raise DataError(message, key=str(index), hint=hint)

        lengths = np.frombuffer(mapped, dtype="<i4", count=sequences, offset=_HEADER.size)
        offsets: Ints = np.frombuffer(mapped, dtype="<i8", count=sequences, offset=_HEADER.size + 4 * sequences)
        first: Ints = np.frombuffer(mapped, dtype="<i8", count=boundaries, offset=_HEADER.size + 12 * sequences)
        dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        expected = int(offsets[-1]) + int(lengths[-1]) * dtype.itemsize if sequences else 0
        if int(first[-1]) != sequences or int(first[0]) != 0:
            raise DataError("says that documents have sequences that are not there", key=str(index), hint=hint)
        if len(raw) != expected:
            message = (
                f"has {len(raw):,} bytes, but {index.name} says {expected:,}: it was cut off or belongs to another"
            )
            raise DataError(message, key=str(content), hint=hint)
        return cls(prefix, raw.view(dtype), offsets, first)


def token_dtype(vocabulary: int) -> type[np.integer]:
    """Return the dtype of the tokens of a vocabulary, as Megatron's tools choose it."""
    return np.uint16 if vocabulary < _LEAST_INT32 else np.int32


class TokenWriter:
    """Writes a token file, one document after the other, as a context. Leaving it without an error completes the file.

    `PREFIX.idx` is renamed into place last, so a file with an index is complete. Raises OSError if writing fails.
    """

    def __init__(self, prefix: Path, dtype: type[np.integer]) -> None:
        self._prefix, self._dtype = prefix, np.dtype(dtype).newbyteorder("<")
        self._lengths: list[int] = []
        self._draft = Path(f"{prefix}.bin.writing")
        self._file = self._draft.open("wb")

    def add(self, tokens: NDArray[np.integer]) -> None:
        """Append a document, integers [n]. Raises DataError if it is too long for the format."""
        if len(tokens) > _MOST_TOKENS:
            message = f"a document has {len(tokens):,} tokens; Megatron's format holds at most {_MOST_TOKENS:,}"
            raise DataError(message, key=str(self._prefix), hint="split the document")
        self._file.write(tokens.astype(self._dtype).tobytes())
        self._lengths.append(len(tokens))

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if error is not None:
            self._draft.unlink(missing_ok=True)
            return
        self._draft.replace(f"{self._prefix}.bin")
        _write_index(self._prefix, self._dtype, np.array(self._lengths, dtype=np.int32))


def concatenate(parts: Sequence[Path], prefix: Path, dtype: type[np.integer]) -> None:
    """Write the documents of several token files, in this order, into one. All have tokens of `dtype`.

    Raises DataError if a part is damaged, OSError if writing fails.
    """
    draft, lengths = Path(f"{prefix}.bin.writing"), [np.empty(0, dtype=np.int32)]
    with draft.open("wb") as file:
        for part in parts:
            opened = TokenFile.open(part)
            lengths.append(opened.lengths(slice(None)).astype(np.int32))
            with Path(f"{part}.bin").open("rb") as source:
                while copied := os.sendfile(file.fileno(), source.fileno(), None, 1 << 30):
                    assert copied > 0
        os.fsync(file.fileno())
    draft.replace(f"{prefix}.bin")
    _write_index(prefix, np.dtype(dtype).newbyteorder("<"), np.concatenate(lengths))


def _write_index(prefix: Path, dtype: np.dtype[np.integer], lengths: NDArray[np.int32]) -> None:
    """Write PREFIX.idx for documents of one sequence each, of `lengths` [D] tokens."""
    (code,) = (code for code, one in _DTYPES.items() if np.dtype(one) == dtype)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    draft = Path(f"{prefix}.idx.writing")
    with draft.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, code, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write((ends - lengths.astype(np.int64) * dtype.itemsize).astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())
    draft.replace(f"{prefix}.idx")
    sync(draft.parent)


def _map(path: Path) -> NDArray[np.uint8]:
    """Map a file into memory, read-only; an empty file gives an empty array."""
    if kind(path) != "file":
        hint = "a token file consists of PREFIX.bin and PREFIX.idx; set data.path to PREFIX"
        raise DataError("no such file", key=str(path), hint=hint)
    try:
        return np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, dtype=np.uint8)
    except OSError as error:
        raise unreadable(path, error) from error
