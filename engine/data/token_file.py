"""Token files in Megatron-LM's format: the tokens of all documents in `PREFIX.bin`, where they are in `PREFIX.idx`.

```
 PREFIX.idx   MMIDIDX\\0\\0 | version: 8 bytes | dtype: 1 | sequences S: 8 | boundaries D + 1: 8
              | lengths of the sequences in tokens: int32 [S] | their offsets in PREFIX.bin in bytes: int64 [S]
              | the first sequence of each document, and S: int64 [D + 1] | modes: int8 [S], only in multimodal files
```
All numbers are little-endian. Megatron's tools write one sequence per document, or one per sentence. Source:
megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM.

A third file is an extension. `PREFIX.mask` exists only if some document excludes a token from the loss, such as those
of a prompt: a bit for each token of `PREFIX.bin`, which is 1 if the token counts as a label. Token i has bit i % 8, the
lowest one first, of byte i // 8; the bits after the last token are 0. The index does not say whether there is a mask,
because its format is Megatron's. What is packed here has `PREFIX.json`, which does (token_facts.py).

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
_ENTRIES = 1 << 20  # of an index, or tokens, that are checked at a time
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
        size, found = count * dtype.itemsize, b""
        while size > len(found) and (part := os.pread(self._handle, size - len(found), at + len(found))):
            found += part  # Linux reads at most 2 GiB at a time
        return np.frombuffer(found[: len(found) // dtype.itemsize * dtype.itemsize], dtype=dtype)


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The documents of a token file. Opening it reads the whole index, about 20 bytes a document, and checks it."""

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

    def _check_index(self) -> None:
        """Raise DataError unless documents have all sequences in order, and these all tokens, each once.

        The sequences may be in any order: Megatron reads `length` tokens at `offset`. With a wrong number in the
        middle, it reads tokens of other documents or outside the file. Only an index whose sequences are not in the
        order of the file is sorted, which takes 40 bytes of memory a sequence.
        """
        size, before, end, ordered = self.dtype.itemsize, 0, 0, True

        # Chunks, because an index may have billions of documents.
        for at in range(0, self.documents + 1, _ENTRIES):
            found = self._boundaries(at, min(at + _ENTRIES, self.documents + 1) - 1)
            if at == 0 and found[0] != 0:
                raise self._damaged(f"document 0 begins at sequence {found[0]}, not 0")
            falls = found < np.concatenate([[before], found[:-1]])  # differences of damaged ones may not fit 64 bits
            if falls.any():
                number = at + int(falls.argmax())
                raise self._damaged(
                    f"document {number} begins at sequence {found[number - at]}, before document {number - 1}"
                )
            before = int(found[-1])
        # Boundaries are ascending and end at the number of sequences, so each sequence belongs to exactly one document.
        # The same is now checked for tokens.
        if before != self.sequences:
            raise self._damaged(f"documents have {before:,} sequences, but there are {self.sequences:,}")
        for at in range(0, self.sequences, _ENTRIES):
            lengths, offsets = self._sequences(at, min(at + _ENTRIES, self.sequences))
            for wrong, what in (
                (lengths < 0, "has a negative length"),
                (offsets < 0, "has a negative offset"),
                (offsets % size != 0, f"begins between two tokens of {size} bytes"),
            ):
                if wrong.any():
                    raise self._damaged(f"sequence {at + int(wrong.argmax())} {what}")
            starts = end + np.cumsum(lengths * size) - lengths * size
            ordered, end = ordered and bool((offsets == starts).all()), end + int(lengths.sum()) * size
        # Sequences that are in the order of the file cover it exactly if they end at its size, so nothing has to be
        # sorted.
        if ordered and self.content.size != end:
            has = f"has {self.content.size:,} bytes, but {self.index.path.name} says {end:,}"
            message = f"{has}: it was cut off or belongs to another index"
            raise DataError(message, key=str(self.content.path), hint=_HINT)
        if not ordered:
            self._check_order()

    def _check_order(self) -> None:
        """Raise DataError unless each token of PREFIX.bin is in one sequence. None has a negative length or offset."""
        lengths, offsets = self._sequences(0, self.sequences)
        lengths *= self.dtype.itemsize
        past, content = offsets > self.content.size - lengths, self.content.path.name
        if past.any():
            end = f"the {self.content.size:,} bytes of {content}"
            raise self._damaged(f"sequence {int(past.argmax())} ends after {end}")
        order = np.flatnonzero(lengths)
        order = order[np.argsort(offsets[order], kind="stable")]
        first, second = order[:-1], order[1:]
        overlap = offsets[first] + lengths[first] > offsets[second]
        if overlap.any():
            pairs = np.sort(np.stack([first[overlap], second[overlap]]), axis=0)
            one, other = pairs[:, pairs[1].argmin()].tolist()
            raise self._damaged(f"sequences {one} and {other} overlap in {content}")
        unused = self.content.size - int(lengths.sum())
        if unused:
            raise self._damaged(f"{unused:,} of {self.content.size:,} bytes of {content} are in no sequence")

    def _damaged(self, message: str) -> DataError:
        return DataError(f"is damaged: {message}", key=str(self.index.path), hint=_HINT)

    def _sequences(self, first: int, last: int) -> tuple[Ints, Ints]:
        """Return the lengths in tokens and the offsets in bytes of sequences first .. last - 1: int64 arrays."""
        lengths = self.index.read("<i4", last - first, _HEADER.size + 4 * first).astype(np.int64)
        return lengths, self.index.read("<i8", last - first, _HEADER.size + 4 * self.sequences + 8 * first)

    def lengths(self, first: int, last: int) -> Ints:
        """Return how many tokens documents first .. last - 1 have: int64 [last - first]."""
        boundaries = self._boundaries(first, last)
        low, high = int(boundaries[0]), int(boundaries[-1])
        before = np.concatenate([[0], np.cumsum(self._sequences(low, high)[0])])  # tokens before each sequence
        found: Ints = np.diff(before[boundaries - low])
        return found

    def _boundaries(self, first: int, last: int) -> Ints:
        """Return the first sequence of documents first .. last - 1, and that of the next: [last - first + 1]."""
        found: Ints = self.index.read("<i8", last - first + 1, _HEADER.size + 12 * self.sequences + 8 * first)
        return found

    def _pieces(self, first: int, last: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return where tokens start .. stop - 1 of documents first .. last - 1 are in PREFIX.bin: ranges, not empty.

        There is a range for each group of consecutive sequences.
        """
        low, high = self._boundaries(first, last)[[0, -1]].tolist()
        lengths, offsets = self._sequences(low, high)
        ends = np.cumsum(lengths)
        shifts = offsets // self.dtype.itemsize - (ends - lengths)  # from the place in the document to that in the file
        found, begin = list[tuple[int, int]](), 0
        for number in np.flatnonzero(
            np.diff(shifts, append=np.iinfo(np.int64).min)
        ).tolist():  # the last sequence of each group
            shift, end = int(shifts[number]), int(ends[number])
            if max(begin, start) < min(end, stop):
                found.append((max(begin, start) + shift, min(end, stop) + shift))
            begin = end
        return found

    def read(self, document: int, start: int, stop: int) -> Ints:
        """Return tokens start .. stop - 1 of a document: int64, fewer if the document is shorter."""
        size = self.dtype.itemsize
        pieces = self._pieces(document, document + 1, start, stop)
        parts = [self.content.read(self.dtype, last - first, first * size) for first, last in pieces]
        return np.concatenate([np.empty(0, dtype=self.dtype), *parts]).astype(np.int64)

    def counted(self, document: int, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Return which of tokens start .. stop - 1 of a document count as labels, fewer if the document is shorter.

        None if all tokens of the file count.
        """
        return self._counted(document, document + 1, start, stop)

    def counted_of(self, first: int, last: int) -> NDArray[np.bool_] | None:
        """Return which tokens of documents first .. last - 1, one after the other, count as labels; None: all."""
        return self._counted(first, last, 0, self.tokens)

    def _counted(self, first: int, last: int, start: int, stop: int) -> NDArray[np.bool_] | None:
        if self.mask is None:
            return None
        parts = [read_bits(self.mask, *piece) for piece in self._pieces(first, last, start, stop)]
        return np.concatenate([np.empty(0, dtype=np.bool_), *parts])

    def extremes(self, most_bytes: int) -> tuple[int, int]:
        """Return the least and the largest token; 0 and 0 if there are none.

        Of a file above `most_bytes`, parts with that many bytes are read, which are spread evenly over it.
        """
        size, chunks = self.dtype.itemsize, -(-self.tokens // _ENTRIES)
        count = max(1, min(chunks, most_bytes // (_ENTRIES * size)))
        numbers: list[int] = np.unique(np.linspace(0, chunks - 1, count).astype(np.int64)).tolist() if chunks else []
        found = [self.content.read(self.dtype, _ENTRIES, number * _ENTRIES * size) for number in numbers]
        return min((int(one.min()) for one in found), default=0), max((int(one.max()) for one in found), default=0)

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
        paths = index, _ = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
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
        opened._check_index()
        if mask is not None and mask.size != -(-opened.tokens // 8):
            message = f"has {mask.size:,} bytes for {opened.tokens:,} tokens: it was cut off or belongs to another file"
            raise DataError(message, key=str(mask.path), hint=_HINT)
        return opened


def token_dtype(vocabulary: int) -> type[np.integer]:
    """Return the dtype of the tokens of a vocabulary, as Megatron's tools choose it."""
    return np.uint16 if vocabulary < _LEAST_INT32 else np.int32


def mask_path(prefix: Path) -> Path:
    """The file that marks the tokens that count in the loss; it is missing if all do."""
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
        """Remove the files that were written."""
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
        """Append a document, integers [n]. `mask`, bool [n], is true for tokens that count as labels; None: all.

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
            lengths.append(opened.lengths(0, len(opened)).astype(np.int32))
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
