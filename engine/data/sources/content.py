"""Rejects files of another format than the config names, by their first bytes: training on them would go unnoticed."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from codecs import BOM_UTF8
from typing import NamedTuple

from engine.config.sources import pattern_of
from engine.data.sources.files import matches
from engine.errors import DataError
from engine.readers import parse_line

HEAD = 1024  # bytes of a file that are looked at
_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")
_LONG = re.compile(rb'(\xef\xbb\xbf)?\s*\{[ \t]*\r?\n\s*"')  # an object that is indented over several lines


class Content(NamedTuple):
    """The format of a file, with the words of its error message."""

    says: str
    hint: str  # how to read it; `{path}` is what to write as data.path, `{split}` and `{join}` commands of jq
    format: str = ""  # `tokens`, a compression or a name in FORMATS; empty if none of these


_EMPTY = Content("is empty: it has 0 bytes", "write or download it again")
_UNPACK = "of JSON lines: write data=jsonl data.path={path}; decompress other files first"
_JSON_LINES = Content("looks like JSON lines", "write data=jsonl data.path={path}")
_JSON_ARRAY = Content("is a JSON array, not JSON lines", "write an object per line: {split}")
_JSON_LONG = Content(
    "begins with one JSON object over several lines, not JSON lines",
    "write an object per line: {join}",
)
_JSON_RECORDS = Content(
    "is a JSON array of objects",
    "write an object per line, {split}, and data=jsonl; data.pattern='**/*.json' takes it as text",
)
_BINARY = Content("contains NUL bytes, so it is not text", "exclude it with data.pattern, or convert it to UTF-8")
_NAMED = _BINARY._replace(hint="convert it to UTF-8, or set data.path to another file")
_UNPACKERS = {".gz": "zcat", ".zst": "zstdcat", ".xz": "xzcat", ".bz2": "bzcat"}
_TWICE = Content("is compressed twice", "decompress it once")
_ZSTD, _BZIP2 = (Content(f"is compressed with {name}", _UNPACK, name) for name in ("zstd", "bzip2"))
_MAGIC = {
    b"\x1f\x8b": Content("is compressed with gzip", _UNPACK, "gzip"),
    b"\x28\xb5\x2f\xfd": _ZSTD,
    **{b"%c\x2a\x4d\x18" % number: _ZSTD for number in range(0x50, 0x60)},  # pzstd begins with a frame without text
    b"\xfd7zXZ\0": Content("is compressed with xz", _UNPACK, "xz"),
    # After BZh and the size of blocks is that of a block, or of the end of a file without any.
    **{b"BZh%d%b" % (size, begin): _BZIP2 for size in range(1, 10) for begin in (b"1AY&SY", b"\x17rE8P\x90")},
    b"\x04\x22\x4d\x18": Content("is compressed with lz4", "decompress it: lz4 -d"),
    b"PAR1": Content("is a Parquet file", "write data=parquet data.path={path}", "parquet"),
    b"ARROW1\0\0": Content("is an Arrow file", "write data=arrow data.path={path}", "arrow"),
    b"\xff\xff\xff\xff": Content("is an Arrow file", "write data=arrow data.path={path}", "arrow"),  # IPC stream
    b"PK\x03\x04": Content("is a zip archive", "extract it, and set data.path to the folder"),
    b"\x93NUMPY": Content("is a numpy array", "write its tokens as Parquet: data=parquet data.field=input_ids"),
    b"MMIDIDX\0\0": Content(
        "is the index of a token file", "write data=tokens data.path=PREFIX, its path without .idx", "tokens"
    ),
}


def recognise(head: bytes) -> Content | None:
    """Return the format of a file that begins with `head`; None for text, which may be JSON."""
    found = next((content for magic, content in _MAGIC.items() if head.startswith(magic)), None)
    return found or (_BINARY if b"\0" in head[:HEAD] else None)


def check(head: bytes, wanted: str, path: str, root: str, unpacked: bool = False, arrays: bool = False) -> None:
    """Raise DataError if a file that begins with `head` is not of the format `wanted`. `root` is data.path.

    `head` is decompressed if the file was `unpacked`. For `folder` it is the whole of it, because the first of its
    lines may be long. `arrays`: a JSON array of objects is a text, too.
    """
    found = recognise(head)
    if found is not None and found.format == wanted:
        return
    if found is not None and found.hint == _UNPACK and unpacked:
        found = _TWICE
    elif found is None and wanted == "folder" and is_json_lines(head, path):
        found = _JSON_LINES
    elif found is None and wanted == "folder" and not arrays and is_json_array(head):
        found = _JSON_RECORDS
    elif found is None and wanted == "jsonl" and head.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
        found = _JSON_ARRAY
    elif found is None and wanted == "jsonl" and _LONG.match(head):
        found = _JSON_LONG
    elif found in (None, _BINARY) and any(content.format == wanted for content in _MAGIC.values()):
        hint = (
            _JSON_LINES.hint
            if head.removeprefix(BOM_UTF8).lstrip().startswith(b"{")
            else f"set data.path or data.pattern to {wanted} files"
        )
        found = Content(f"is not a file in the format {wanted}", hint) if head else _EMPTY
    if found is _BINARY and path == root:
        found = _NAMED
    if found is not None:
        # Without data.pattern, another format reads files of a folder by their names: it must find this one.
        meant = re.search(r"data=(\w+) data\.path=\{path\}", found.hint)
        by_name = meant is not None and matches(posixpath.basename(path), pattern_of(meant[1]))
        named, split, join = shlex.quote(root if by_name else path), _with_jq("'.[]'", path), _with_jq(".", path)
        raise DataError(found.says, key=path, hint=found.hint.format(path=named, split=split, join=join))


def _with_jq(expression: str, path: str) -> str:
    """Return the command that writes the values of a JSON file to a file of JSON lines."""
    stem, suffix = posixpath.splitext("OLD.json" if "://" in path else path)
    name = shlex.quote(stem + suffix)
    command = f"jq -c {expression} {name}"
    if suffix in _UNPACKERS:
        stem, command = posixpath.splitext(stem)[0], f"{_UNPACKERS[suffix]} {name} | jq -c {expression}"
    new = f"{stem}.lines.jsonl" if f"{stem}.jsonl" == path else f"{stem}.jsonl"
    return f"{command} > {shlex.quote(new)}"


def is_named(head: bytes, path: str, named: bool) -> bool:
    """Return whether a file has one of the suffixes of a format: nothing in its content says more."""
    return named


def is_only_recognised(head: bytes, path: str, named: bool) -> bool:
    """Return False: files of a format with fixed first bytes are those that `recognise` finds, whatever their names."""
    return False


def is_json(head: bytes, path: str, named: bool) -> bool:
    """Return whether a file is to be read as JSON lines: also an array, because `check` says how to convert it."""
    if recognise(head) is not None:
        return False
    opens = named and head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[", b"")
    return opens or is_json_lines(head, path) or is_json_array(head)


def is_json_lines(text: bytes, path: str) -> bool:
    """Return whether a text begins with two lines that are JSON objects. A single one may be any JSON file."""
    text = text.removeprefix(BOM_UTF8).lstrip()
    end = text.find(b"\n") + 1 or len(text)
    alone = path.endswith(".jsonl") and not text[end:].strip()
    if not (text.startswith(b"{") and (alone or text[end : end + HEAD].lstrip().startswith(b"{"))):
        return False
    try:
        return isinstance(parse_line(text[:end]), dict)
    except ValueError:
        return False


def is_json_array(text: bytes) -> bool:
    """Return whether a text is a JSON array that begins with an object: more objects follow, or its end."""
    if not _ARRAY.match(text):
        return False
    try:
        found = text.decode("utf-8-sig")
        begin = found.index("{")
        _, end = json.JSONDecoder().raw_decode(found, begin)
    except (ValueError, RecursionError):
        return False
    return found[end : end + HEAD].lstrip().startswith((",", "]"))
