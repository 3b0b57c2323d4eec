"""Token files in Megatron-LM's format: the tokens of all documents in `PREFIX.bin`, where they are in `PREFIX.idx`.

```
 PREFIX.idx   MMIDIDX\\0\\0 | version: 8 bytes | dtype: 1 | sequences S: 8 | boundaries D + 1: 8
              | lengths of the sequences in tokens: int32 [S] | their offsets in PREFIX.bin in bytes: int64 [S]
              | the first sequence of each document, and S: int64 [D + 1] | modes: int8 [S], only in multimodal files
```
All numbers are little-endian. Megatron's tools write one sequence per document, or one per sentence. Source:
megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM.

A third file is ours. `PREFIX.mask` is there only if some document excludes a token from the loss, such as those of a
prompt: a bit for each token of `PREFIX.bin`, which is 1 if the token counts as a label. Token i has bit i % 8, the
lowest one first, of byte i // 8; the bits after the last token are 0. The index does not say whether there is a mask,
because its format is Megatron's. What is packed here has `PREFIX.json`, which does (pack.py).

Letters: D documents, S sequences, T tokens.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engine.data.sources.files import kind, unreadable
from engine.errors import DataError
from engine.files import new_file, sync
from engine.units import Ints

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are float64, float32
_LEAST_INT32 = 65500  # vocabularies of this size have int32 tokens, smaller ones uint16, as in Megatron's tools
_MOST_TOKENS = 2**31 - 1  # of a sequence, whose length is an int32
_CHUNK = 8 << 20  # tokens whose mask is written at a time; a multiple of 8
_HINT = "write the files again, for example with `bytescale data pack`"


class Numbers:
    """A file of which any part can be read as numbers. It stays open as long as this object exists.

    It is not mapped into memory, because pages of a mapped file count as memory of the process. Raises DataError if the
    file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(path, error) from error
        weakref.finalize(self, os.close, self._handle)

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return os.fstat(self._handle).st_size

    def read(self, dtype: DTypeLike, count: int, at: int) -> NDArray[Any]:
        """Read `count` numbers from byte `at` on; fewer if the file ends before."""
        dtype = np.dtype(dtype)
        found = os.pread(self._handle, count * dtype.itemsize, at)
        return np.frombuffer(found[: len(found) // dtype.itemsize * dtype.itemsize], dtype=dtype)


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The documents of a token file. Only what is asked for is read, so opening takes the same time for any file."""

    prefix: Path
    documents: int
    sequences: int
    tokens: int
    dtype: np.dtype[np.integer]
    index: Numbers
    content: Numbers
    mask: Numbers | None  # None: all tokens count in the loss

    def __len__(self) -> int:
        return self.documents

    def bounds(self, first: int, last: int) -> Ints:
        """Return at which token documents first .. last - 1 begin, and where the last one ends: [last - first + 1]."""
        boundaries = self.index.read("<i8", last - first + 1, _HEADER.size + 12 * self.sequences + 8 * first)
        low, high = int(boundaries[0]), int(boundaries[-1])
        at = _HEADER.size + 4 * self.sequences + 8 * low
        offsets: Ints = self.index.read("<i8", min(high + 1, self.sequences) - low, at)
        places = np.append(offsets // self.dtype.itemsize, self.tokens)  # the last one, if `high` is S
        found: Ints = places[boundaries - low]
        return found

    def read(self, document: int, start: int, stop: int) -> Ints:
        """Return tokens start .. stop - 1 of a document: int64, fewer if the document is shorter."""
        begin, end = self.bounds(document, document + 1).tolist()
        first, last = min(begin + start, end), min(begin + stop, end)
        return self.content.read(self.dtype, last - first, first * self.dtype.itemsize).astype(np.int64)

    def counted(self, document: int, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Return which of tokens start .. stop - 1 of a document count as labels, fewer if the document is shorter.

        None if all tokens of the file count.
        """
        if self.mask is None:
            return None
        begin, end = self.bounds(document, document + 1).tolist()
        first, last = min(begin + start, end), min(begin + stop, end)
        return read_bits(self.mask, first, last)

    def check_mask(self, expected: bool) -> None:
        """Raise DataError if there is a mask but none is expected, or none although one is."""
        if (self.mask is not None) != expected:
            message = (
                "no such file: all tokens would count in the loss" if expected else "belongs to another token file"
            )
            raise DataError(message, key=str(mask_path(self.prefix)), hint=_HINT)

    @classmethod
    def open(cls, prefix: Path) -> TokenFile:
        """Open PREFIX.idx, PREFIX.bin, and PREFIX.mask if it exists.

        Raises DataError if a file is missing, damaged, or does not fit the others.
        """
        paths = index, content = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in paths:
            if kind(path) != "file":
                missing = "a token file consists of PREFIX.bin and PREFIX.idx; set data.path to PREFIX"
                raise DataError("no such file", key=str(path), hint=missing)
        numbers, tokens = (Numbers(path) for path in paths)
        header = numbers.read(np.uint8, _HEADER.size, 0).tobytes()
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise DataError("is not an index of a token file in Megatron's format", key=str(index), hint=_HINT)
        _, version, code, sequences, boundaries = _HEADER.unpack(header)
        if version != 1 or code not in _DTYPES:
            message = f"has version {version} and dtype {code}; supported are version 1 and integers"
            raise DataError(message, key=str(index), hint=_HINT)
        size = _HEADER.size + 12 * sequences + 8 * boundaries
        if numbers.size not in (size, size + sequences) or boundaries < 1:  # with modes, or without
            message = f"has {numbers.size:,} bytes, but its header says {size:,}: it was cut off or changed"
            raise DataError(message, key=str(index), hint=_HINT)
        dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
        mask = Numbers(mask_path(prefix)) if kind(mask_path(prefix)) == "file" else None
        opened = cls(prefix, boundaries - 1, sequences, tokens.size // dtype.itemsize, dtype, numbers, tokens, mask)
        at = _HEADER.size + 12 * sequences
        if numbers.read("<i8", 1, at)[0] or numbers.read("<i8", 1, at + 8 * (boundaries - 1))[0] != sequences:
            raise DataError("says that documents have sequences that are not there", key=str(index), hint=_HINT)
        expected = 0
        if sequences:
            length = int(numbers.read("<i4", 1, _HEADER.size + 4 * (sequences - 1))[0])
            expected = int(numbers.read("<i8", 1, at - 8)[0]) + length * dtype.itemsize
        if tokens.size != expected:
            has = f"has {tokens.size:,} bytes, but {index.name} says {expected:,}"
            message = f"{has}: it was cut off or belongs to another index"
            raise DataError(message, key=str(content), hint=_HINT)
        if mask is not None and mask.size != -(-opened.tokens // 8):
            message = f"has {mask.size:,} bytes for {opened.tokens:,} tokens: it was cut off or belongs to another file"
            raise DataError(message, key=str(mask.path), hint=_HINT)
        return opened


def token_dtype(vocabulary: int) -> type[np.integer]:
    """Return the dtype of the tokens of a vocabulary, as Megatron's tools choose it."""
    return np.uint16 if vocabulary < _LEAST_INT32 else np.int32


def mask_path(prefix: Path) -> Path:
    """The file that says which tokens count in the loss; it is missing if all do."""
    return Path(f"{prefix}.mask")


def read_bits(file: Numbers, first: int, last: int) -> NDArray[np.bool_]:
    """Read bits first .. last - 1 of a file, the lowest bit of each byte first: bool [last - first]."""
    packed = file.read(np.uint8, -(-last // 8) - first // 8, first // 8)
    return np.unpackbits(packed, bitorder="little")[first % 8 :][: last - first].astype(np.bool_)


class MaskWriter:
    """Writes PREFIX.mask from the masks of documents. It begins the file with the first token that does not count."""

    def __init__(self, prefix: Path) -> None:
        self._path, self._draft = mask_path(prefix), Path(f"{prefix}.mask.writing")
        self._file: BinaryIO | None = None
        self._counting = 0  # tokens before the file is begun
        self._rest = np.empty(0, dtype=np.bool_)  # fewer than 8 bits, which do not fill a byte yet

    def add(self, tokens: int, mask: NDArray[np.bool_] | None) -> None:
        """Append the mask of `tokens` tokens, bool [tokens]; None if all count. Raises OSError."""
        if self._file is None and (mask is None or mask.all()):
            self._counting += tokens
            return
        if self._file is None:
            self._file = new_file(self._draft)
            self._append_counting(self._counting)
        if mask is None:
            self._append_counting(tokens)
        else:
            self._append(mask)

    def _append_counting(self, tokens: int) -> None:
        for at in range(0, tokens, _CHUNK):  # of a whole file, which may have billions
            self._append(np.ones(min(_CHUNK, tokens - at), dtype=np.bool_))

    def _append(self, mask: NDArray[np.bool_]) -> None:
        assert self._file is not None
        bits = np.concatenate([self._rest, mask])
        full = len(bits) // 8 * 8
        self._file.write(np.packbits(bits[:full], bitorder="little").tobytes())
        self._rest = bits[full:]

    def finish(self) -> None:
        """Rename the file into place, or remove one that another file of this name has left. Raises OSError."""
        if self._file is None:
            self._path.unlink(missing_ok=True)
            return
        self._file.write(np.packbits(self._rest, bitorder="little").tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._draft.replace(self._path)

    def discard(self) -> None:
        """Remove what was written."""
        if self._file is not None:
            self._file.close()
            self._draft.unlink(missing_ok=True)


class TokenWriter:
    """Writes a token file, one document after the other, as a context. Leaving it without an error completes the file.

    `PREFIX.idx` is renamed into place last, so a file with an index is complete. Raises OSError if writing fails.
    """

    def __init__(self, prefix: Path, dtype: type[np.integer]) -> None:
        self._prefix, self._dtype = prefix, np.dtype(dtype).newbyteorder("<")
        self._lengths: list[int] = []
        self._draft = Path(f"{prefix}.bin.writing")
        self._file = new_file(self._draft)
        self._mask = MaskWriter(prefix)

    def add(self, tokens: NDArray[np.integer], mask: NDArray[np.bool_] | None = None) -> None:
        """Append a document, integers [n]. `mask`, bool [n], says which tokens count as labels; None: all.

        Raises DataError if it is too long for the format.
        """
        if len(tokens) > _MOST_TOKENS:
            message = f"a document has {len(tokens):,} tokens; Megatron's format holds at most {_MOST_TOKENS:,}"
            raise DataError(message, key=str(self._prefix), hint="split the document")
        assert mask is None or len(mask) == len(tokens)
        self._file.write(tokens.astype(self._dtype).tobytes())
        self._mask.add(len(tokens), mask)
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
            self._mask.discard()
            return
        self._draft.replace(f"{self._prefix}.bin")
        self._mask.finish()
        write_index(self._prefix, self._dtype, np.array(self._lengths, dtype=np.int32))


def concatenate(parts: Sequence[Path], prefix: Path, dtype: type[np.integer]) -> None:
    """Write the documents of several token files, in this order, into one. All have tokens of `dtype`.

    Raises DataError if a part is damaged, OSError if writing fails.
    """
    draft, mask, lengths = Path(f"{prefix}.bin.writing"), MaskWriter(prefix), [np.empty(0, dtype=np.int32)]
    with new_file(draft) as file:
        for part in parts:
            opened = TokenFile.open(part)
            lengths.append(np.diff(opened.bounds(0, len(opened))).astype(np.int32))
            with Path(f"{part}.bin").open("rb") as source:
                while copied := os.sendfile(file.fileno(), source.fileno(), None, 1 << 30):
                    assert copied > 0
            for at in range(0, opened.tokens, _CHUNK):
                stop = min(at + _CHUNK, opened.tokens)
                mask.add(stop - at, None if opened.mask is None else read_bits(opened.mask, at, stop))
        os.fsync(file.fileno())
    draft.replace(f"{prefix}.bin")
    mask.finish()
    write_index(prefix, np.dtype(dtype).newbyteorder("<"), np.concatenate(lengths))


def write_index(prefix: Path, dtype: np.dtype[np.integer], lengths: NDArray[np.int32]) -> None:
    """Write PREFIX.idx for documents of one sequence each, of `lengths` [D] tokens."""
    (code,) = (code for code, one in _DTYPES.items() if np.dtype(one) == dtype)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    draft = Path(f"{prefix}.idx.writing")
    with new_file(draft) as file:
        file.write(_HEADER.pack(_MAGIC, 1, code, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write((ends - lengths.astype(np.int64) * dtype.itemsize).astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())
    draft.replace(f"{prefix}.idx")
    sync(draft.parent)
