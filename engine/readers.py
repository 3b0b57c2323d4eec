"""Reads files that others may have written: regular files alone, of a limited size, and JSON of a limited depth.

Every refusal is the error that the caller chooses, with the place (`file` or `file:line`), the cause and the way out.
`engine/config/yaml_reader.py` does the same for YAML.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import BytescaleError, DataError

MIB = 1 << 20
SMALL = 16 * MIB  # bytes of files that people edit, and of what a run says about itself
LARGE = 256 * MIB  # bytes of files that grow with a model: tokenizers (known: 35 MiB), indexes of tensors
GIB = 1 << 30
HUGE = 16 * GIB  # bytes of files that grow with the steps of a run and their documents
DEEPEST = 100  # lists and objects inside each other
AGAIN = "copy it again from its source"
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# These are about a path, as its absence is; others are about storage and permissions (`errors.storage_error`).
_OF_PATHS = (errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENXIO)
_MOST = 2**1023  # of whole numbers: larger ones are no floats. JSON has no limit, and 1e999 becomes infinity.
_SHOWN = 60  # characters of a key in a message
SAVE = "save the file as UTF-8"

Refusal = type[BytescaleError]


def open_regular(path: Path, error: Refusal = DataError, hint: str = AGAIN) -> BinaryIO:
    """Open a regular file, or a link to one, to read bytes.

    Anything else is rejected unopened: a named pipe would wait for a writer, and /dev/zero never ends. Raises `error`;
    FileNotFoundError, PermissionError and errors of the storage pass, since callers and the command line name these.
    """
    try:
        _check_regular(path.stat(), path, error, hint)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _check_regular(os.fstat(handle), path, error, hint)  # another file may have taken its place
        except BytescaleError:
            os.close(handle)
            raise
    except ValueError as found:  # a NUL, or half a character, in its name
        raise error(f"is not the name of a file: {found}", key=str(path), hint=hint) from found
    except OSError as found:
        if found.errno not in _OF_PATHS:
            raise
        raise error(f"cannot be read: {found.strerror}", key=str(path), hint=hint) from found
    return os.fdopen(handle, "rb")


def _check_regular(found: os.stat_result, path: Path, error: Refusal, hint: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        what = next((name for test, name in _KINDS if test(found.st_mode)), "something else")
        raise error(f"is {what}, not a file", key=str(path), hint=hint)


def read_bytes(path: Path, most: int = SMALL, error: Refusal = DataError, hint: str = AGAIN) -> bytes:
    """Read a regular file of at most `most` bytes. Raises as `open_regular`."""
    with open_regular(path, error, hint) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(most + 1) if size <= most else b""
    if max(size, len(content)) > most:
        message = f"is too large: {max(size, len(content)):,} bytes, and such a file has at most {most:,}"
        raise error(message, key=str(path), hint=hint)
    return content


def read_text(path: Path, most: int = SMALL, error: Refusal = DataError, hint: str = AGAIN) -> str:
    """Read a regular file of UTF-8, without its byte order mark if it has one. Raises as `read_bytes`."""
    return _text(read_bytes(path, most, error, hint).removeprefix(BOM_UTF8), str(path), error)


def read_json(path: Path, most: int = SMALL, error: Refusal = DataError, hint: str = AGAIN) -> Any:
    """Read a file of JSON. Raises as `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, most, error, hint), str(path), error, hint)


def read_object(path: Path, most: int = SMALL, error: Refusal = DataError, hint: str = AGAIN) -> dict[str, Any]:
    """Read a file that is a JSON object. Raises as `read_json`."""
    return parse_object(read_bytes(path, most, error, hint), str(path), error, hint)


def parse_object(content: bytes, place: str, error: Refusal = DataError, hint: str = AGAIN) -> dict[str, Any]:
    """Parse a JSON object; see `parse_json`."""
    found = parse_json(content, place, error, hint)
    if not isinstance(found, dict):
        raise error("is not a JSON object", key=place, hint=hint)
    return found


def parse_json(content: bytes, place: str, error: Refusal = DataError, hint: str = AGAIN) -> Any:
    """Parse JSON in UTF-8.

    Raises `error` at `place`, also for input that Python accepts but JSON does not allow: a key twice in one object,
    which would lose a value; NaN, infinity and numbers beyond the range of float; unpaired surrogates; values nested
    more than DEEPEST deep, on which recursive functions would fail.
    """
    if content.startswith(BOM_UTF8):
        raise error("begins with a byte order mark, which JSON does not have", key=place, hint=SAVE + " without one")
    text = _text(content, place, error)
    try:
        found = _parse(text)
    except json.JSONDecodeError as wrong:
        at = f"{place}:{wrong.lineno}"
        raise error(f"is not JSON at column {wrong.colno}: {wrong.msg}", key=at, hint=hint) from wrong
    except ValueError as wrong:
        raise error(str(wrong), key=place, hint=hint) from wrong
    if "\\ud" in text or "\\uD" in text:  # an escape of half a character, unless the other half follows
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as wrong:
            raise error("contains an unpaired surrogate", key=place, hint=hint) from wrong
    return found


def parse_line(content: bytes | bytearray | str) -> Any:
    """Parse a line of a log that this program writes. After a crash it may be anything: raises ValueError.

    It is not checked otherwise: metrics have millions of lines.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def _parse(text: str) -> Any:
    """Parse JSON as `parse_json` does. Raises json.JSONDecodeError, or ValueError without a position."""
    try:
        try:
            found = _DECODER.decode(text)
        except json.JSONDecodeError:
            raise
        except ValueError as wrong:
            if not str(wrong).startswith("Exceeds the limit"):  # of digits, which names no key
                raise
            found = json.loads(text, parse_int=float)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(found)
    if (name := wrong_number(found)) is not None:
        raise ValueError(f"{name} is not a number that a float can have")
    return found


def check_depth(value: Any) -> None:
    """Raise ValueError if lists and objects are more than DEEPEST deep. Does not call itself, as most users of them."""
    level, depth = [value] if type(value) in (dict, list) else [], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(_TOO_DEEP)
        values = (above.values() if type(above) is dict else above for above in level)
        level = [one for some in values for one in some if type(one) is dict or type(one) is list]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object. Raises ValueError if it has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"has the key {twice[:_SHOWN]!r} twice in one object")
    return found


def wrong_number(value: Any, kinds: tuple[type, ...] = (int, float), name: str = "") -> str | None:
    """Return the name of the first number, of one of `kinds`, that is not finite as a float: `rope_scaling.factor`.

    None if there is none. `value` must not be too deep.
    """
    if isinstance(value, (dict, list)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        named = (wrong_number(one, kinds, f"{name}.{key}" if name else str(key)) for key, one in pairs)
        return next((one for one in named if one is not None), None)
    wrong = type(value) in kinds and not -_MOST < value < _MOST
    return (name[:_SHOWN] or "the value") if wrong else None


def _text(content: bytes, place: str, error: Refusal) -> str:
    """Decode UTF-8. Raises `error` with the line that is not."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as wrong:
        utf16 = content.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
        what = "is UTF-16, not UTF-8" if utf16 else f"is not UTF-8 at byte {wrong.start}"
        at = place if utf16 else f"{place}:{content.count(10, 0, wrong.start) + 1}"
        raise error(what, key=at, hint=SAVE) from wrong


_TOO_DEEP = f"has lists or objects that are more than {DEEPEST} deep"
_DECODER = json.JSONDecoder(object_pairs_hook=_object)
