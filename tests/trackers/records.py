"""Reads the file of a W&B run that is offline: a log of records as LevelDB writes it, each a message of protobuf.

The format is LevelDB's (doc/log_format.md): after a header of 7 bytes, blocks of 32 KiB with parts of records, each
with a CRC-32C, a length of 2 bytes and a type: 1 a whole record, 2 its first part, 3 a middle one, 4 the last.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_BLOCK, _FILE_HEADER, _HEADER = 32768, 7, 7


def records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file."""
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    at, record = _FILE_HEADER, b""
    while at + _HEADER <= len(content):
        if _BLOCK - at % _BLOCK < _HEADER:  # the end of a block, too short for a header, is padding
            at += _BLOCK - at % _BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + _HEADER : at + _HEADER + size]
        at += _HEADER + size
        if kind in (1, 4):
            yield record
            record = b""
