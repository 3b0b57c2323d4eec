"""Documents that are the lines of a JSONL file: one JSON object a line, its text in one field."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from engine.config import schema
from engine.config.spelling import nearest
from engine.data.files import kind, reading
from engine.errors import DataError

_PARSED_LINES = 8  # a rank reads a document's spans close together, so a few parsed lines save most of the parsing


class JsonlSource:
    """The lines of a file that are not blank; a document's name is `file:line`. `blank` counts the others."""

    def __init__(self, data: schema.Data) -> None:
        self._path = file_of(data)
        self._field = data.field
        self._lines, self._offsets, self.blank = _scan(self._path)
        self.names = tuple(f"{self._path.name}:{line}" for line in self._lines)
        self._text = lru_cache(_PARSED_LINES)(self._parse)
        if not self.names:
            raise DataError("has no line with a document", key=data.path, hint="set data.path to another file")

    def place(self, document: int) -> str:
        """Return where a document stands, for messages."""
        return f"{self._path}:{self._lines[document]}"

    def read(self, document: int) -> bytes:
        """Return a document's text in UTF-8. Raises DataError when its line is not an object with such a text."""
        return self._text(document)

    def read_span(self, document: int, start: int, stop: int) -> bytes:
        """Return bytes start..stop of a document's text; fewer if it has become shorter."""
        return self._text(document)[start:stop]

    def _parse(self, document: int) -> bytes:
        with reading(self._path) as file:
            file.seek(self._offsets[document])
            line = file.readline().rstrip(b"\r\n")
        return text_of(line, self._field, self.place(document))


def text_of(line: bytes, field: str, place: str) -> bytes:
    """Return the text of a JSONL line, in UTF-8. Raises DataError, which names `place`, when it has none."""
    record = _parse_json(line, place)
    if not isinstance(record, dict):
        raise DataError("is not a JSON object", key=place, hint=f'write {{"{field}": "..."}} on each line')
    if field not in record:
        raise DataError(f"has no field {field!r}", key=place, hint=_field_hint(field, list(record)))
    text = record[field]
    if not isinstance(text, str):
        raise DataError(
            f"has a field {field!r} that is not a string", key=place, hint="set data.field to a field of text"
        )
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        message = f"holds half of a surrogate pair, {surrogate}, at character {error.start} of its text"
        raise DataError(message, key=place, hint="mend or remove the line") from error


def _parse_json(line: bytes, place: str) -> object:
    hint = "mend or remove the line"
    try:
        parsed: object = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 at byte {error.start} of the line"
        raise DataError(message, key=place, hint="convert the file to UTF-8") from error
    except json.JSONDecodeError as error:
        message = f"is not JSON at column {error.colno}: {error.msg}"
        raise DataError(message, key=place, hint=hint) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or deep nesting
        raise DataError("holds JSON that Python does not parse", key=place, hint=hint) from error
    return parsed


def _field_hint(field: str, fields: list[str]) -> str:
    close = nearest(field, fields)
    if close is not None:
        return f"did you mean data.field={close}?"
    return f"set data.field to one of {', '.join(map(repr, fields[:8]))}" if fields else "the object is empty"


def file_of(data: schema.Data) -> Path:
    """Return the path of a config's file. Raises DataError when there is none."""
    path = Path(data.path)
    found = kind(path)
    if found == "missing":
        raise DataError("there is no such file", key=data.path, hint="set data.path to a .jsonl file")
    if found == "folder":
        raise DataError("is a folder, not a file", key=data.path, hint="data.format=folder reads its files")
    return path


def _scan(path: Path) -> tuple[list[int], list[int], int]:
    """Return the numbers (from 1) and byte offsets of the lines that are not blank, and how many are blank."""
    lines, offsets, blank, offset = [], [], 0, 0
    with reading(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                blank += 1
            else:
                lines.append(number)
                offsets.append(offset)
            offset += len(line)
    return lines, offsets, blank
