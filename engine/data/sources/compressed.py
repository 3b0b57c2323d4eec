"""Reads files that may be compressed with gzip, zstd, xz or bzip2, in one part or several.

The libraries have their own readers, but zstandard's does not detect a truncated file.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, cast

from engine.cluster.available_memory import available_bytes
from engine.data.sources.content import HEAD, recognise
from engine.data.sources.files import READABLE, reading
from engine.data.sources.library import library
from engine.errors import DataError

COMPRESSED = ("gzip", "zstd", "xz", "bzip2")
SUFFIXES = (".gz", ".zst", ".xz", ".bz2")
# Compressed bytes to decompress at a time, so that at most 128 MiB result: zlib reaches a factor of 1,000, zstd 32,768.
# The other libraries take a limit for the result.
_CHUNK_BYTES = {"gzip": 64 << 10, "zstd": 4 << 10, "xz": 64 << 10, "bzip2": 64 << 10}
_RESULT_BYTES = 16 << 20
MOST_BYTES = 1 << 30  # of a document: a few kilobytes can be decompressed to any number
_LEAST_WINDOW, _MOST_WINDOW = 1 << 27, 1 << 31  # of zstd: the limit by default, and the window of `zstd --long=31`


@contextmanager
def unpacked(path: Path | str, hint: str = READABLE, most: int | None = None) -> Iterator[BinaryIO]:
    """Open a file to read its decompressed contents. `hint` is as for `reading`.

    Raises DataError, also while it is read, for a file that is damaged, was cut off, or becomes longer than `most`.
    """
    with reading(path, hint) as file:
        packed = compression(file.read(HEAD))
        file.seek(0)
        if packed is None:
            yield file
        else:
            yield cast(BinaryIO, BufferedReader(_Unpacked(str(path), file, packed, most), 1 << 20))


def compression(head: bytes) -> str | None:
    """Return the compression format of a file that begins with `head`; None if it is not compressed."""
    found = recognise(head)
    return found.format if found is not None and found.format in COMPRESSED else None


class _Unpacked(RawIOBase):
    """The contents of a compressed file, decompressed as they are read."""

    def __init__(self, path: str, file: BinaryIO, packed: str, most: int | None) -> None:
        self._path, self._packed, self._left, self._rest = path, packed, memoryview(b""), most
        self._chunks = self._unpack(file)

    def _decoder(self) -> Any:
        """Return a decoder of one part. It may use half of the memory that is left, because loaders read several."""
        memory = (available_bytes() or 2 * _MOST_WINDOW) // 2
        if self._packed == "gzip":
            return zlib.decompressobj(31)
        if self._packed == "bzip2":
            return bz2.BZ2Decompressor()
        if self._packed == "xz":
            return lzma.LZMADecompressor(memlimit=max(memory, _LEAST_WINDOW))
        window = min(max(memory, _LEAST_WINDOW), _MOST_WINDOW)
        decoder = library("zstandard", self._path).ZstdDecompressor(max_window_size=1 << window.bit_length() - 1)
        return decoder.decompressobj()

    def _unpack(self, file: BinaryIO) -> Iterator[bytes]:
        part: Any = None
        bounded = (_RESULT_BYTES,) if self._packed in ("xz", "bzip2") else ()
        while packed := file.read(_CHUNK_BYTES[self._packed]):
            while packed:
                if part is None or part.eof:
                    if part and not packed.strip(b"\0"):
                        break  # padding after the last part
                    part = self._decoder()
                yield self._decompress(part, packed, *bounded)
                while bounded and not (part.eof or part.needs_input):
                    yield self._decompress(part, b"", *bounded)
                packed = part.unused_data
        if part is None or not part.eof:
            raise DataError("was cut off", key=self._path, hint="compress or download it again")

    def _decompress(self, part: Any, packed: bytes, *bounded: int) -> bytes:
        """Decompress some bytes. Raises DataError if they are damaged, or need more memory than there is."""
        try:
            return cast(bytes, part.decompress(packed, *bounded))
        except Exception as error:  # each library has its own: bz2 raises a plain OSError, zstandard one of its types
            if not isinstance(error, (zlib.error, lzma.LZMAError, OSError, MemoryError)) and self._packed != "zstd":
                raise
            reason = " ".join(str(error).split())
            message, hint = f"cannot be decompressed: {reason}", "compress or download it again"
            if "memory" in reason.lower() or isinstance(error, MemoryError):
                message = "needs more memory to be decompressed than this machine has left"
                again = {"zstd": "zstd -d --long=31", "xz": "xz -d"}.get(self._packed, f"{self._packed} -d")
                hint = f"decompress it elsewhere (`{again}`), and compress it again with defaults: without --long"
            raise DataError(message, key=self._path, hint=hint) from error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = memoryview(chunk)
            if self._rest is not None:
                self._rest -= len(chunk)
                if self._rest < 0:
                    message, hint = "is more than 1 GiB of text when decompressed", "split it, or exclude it"
                    raise DataError(message, key=self._path, hint=hint)
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size
