"""Arrays with a JSON head as one buffer: the content of rank files, and of messages between hosts.

```
 size of the head, hash of all that follows | [{"step": 7}, [["lengths", "<i4", [2]], ["tokens", "<i4", [9]]]] | arrays
```
The arrays follow each other, each at a multiple of 8 bytes. Reading a buffer executes nothing, and copies no array.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.readers import parse_line

Arrays = Mapping[str, NDArray[Any]]
_START = struct.Struct("<q16s")
_DTYPES = ("<i4", "<i8", "<u8", "|u1")
_ALIGNED = 8


def to_bytes(head: Any, arrays: Arrays) -> bytes:
    """Return a buffer with a head of plain data and arrays of int32, int64, uint64 or uint8."""
    ordered = {name: np.ascontiguousarray(one, one.dtype.newbyteorder("<")) for name, one in arrays.items()}
    listed = [[name, one.dtype.str, one.shape] for name, one in ordered.items()]
    assert all(dtype in _DTYPES for _, dtype, _ in listed), listed
    text = json.dumps([head, listed], separators=(",", ":")).encode()
    parts = [text + b" " * (-len(text) % _ALIGNED)]
    for one in ordered.values():
        parts += [one.tobytes(), bytes(-one.nbytes % _ALIGNED)]
    content = b"".join(parts)
    return _START.pack(len(parts[0]), _hash(content)) + content


def from_bytes(buffer: bytes | memoryview) -> tuple[Any, dict[str, NDArray[Any]]]:
    """Return the head and the arrays, as views, of a buffer of `to_bytes`. Raises ValueError for any other buffer."""
    view = memoryview(buffer)
    if len(view) < _START.size:
        raise ValueError("was cut off")
    size, expected = _START.unpack(view[: _START.size])
    content = view[_START.size :]
    if _hash(content) != expected:
        raise ValueError("was cut off or changed")
    arrays, end = dict[str, NDArray[Any]](), size
    try:
        head, listed = parse_line(bytes(content[:size]))
        for name, dtype, shape in listed:
            if dtype not in _DTYPES:
                raise ValueError(f"has an array of {dtype}")
            count = math.prod(shape)
            arrays[name] = np.frombuffer(content, dtype, count, end).reshape(shape)
            end += arrays[name].nbytes + -arrays[name].nbytes % _ALIGNED
    except TypeError as error:
        raise ValueError("has no list of arrays") from error
    return head, arrays


def _hash(content: bytes | memoryview) -> bytes:
    return blake2b(content, digest_size=16).digest()
