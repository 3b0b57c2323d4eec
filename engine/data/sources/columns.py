"""Documents from the columns of Arrow's tables, which Parquet and Arrow files contain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from engine.data.sources.chat import MESSAGES, TOOLS, chat_document
from engine.data.sources.files import library
from engine.data.sources.source import (
    MASK,
    Document,
    checked_text,
    mask_without_ids,
    no_such_field,
    token_document,
)
from engine.errors import DataError


def columns(table: Any, field: str, path: str) -> list[str]:
    """Return the columns to read of a pyarrow.Schema: `field`, the mask beside token ids, and the tools beside a chat.

    Raises DataError if there is no such column, or several, or if it contains neither texts nor token ids nor chats.
    """
    usable = [one.name for one in table if one.name != MASK and _contents(one.type, one.name, path) is not None]
    if field not in table.names:
        raise no_such_field(path, field, usable, "column")
    for name in (field, MASK, TOOLS):  # pyarrow finds none by a name that several have
        if table.names.count(name) > 1:
            message = f"has {table.names.count(name)} columns named {name!r}"
            raise DataError(message, key=path, hint="rename or remove all but one, and write it again")
    kind = table.field(field).type
    contents = _contents(kind, field, path)
    if contents == "ids":
        mask = table.field(MASK).type if MASK in table.names else None
        if mask is not None and not (_is_list(mask, path) or library("pyarrow.types", path).is_null(mask)):
            message = f"column {MASK!r} has the type {mask}, which is not a list of integers"
            raise DataError(message, key=path, hint="write one value per id, 0 or 1")
        return [field] if mask is None else [field, MASK]
    if contents is None:
        message = f"column {field!r} has the type {kind}, which is neither text nor token ids nor a list of messages"
        hint = f"set data.field to one of {', '.join(map(repr, usable[:8]))}" if usable else "no other column is"
        raise DataError(message, key=path, hint=hint)
    if MASK in table.names:
        raise mask_without_ids(path, field, contents)
    return [field, TOOLS] if contents == "chat" and TOOLS in table.names else [field]


def documents(batch: Any, field: str, encoding: str, path: str, row: int) -> Iterator[Document]:
    """Yield the documents of a pyarrow.RecordBatch, whose first row has the number `row` in messages."""
    column, beside = batch.column(field), ""
    read: Callable[[Any, Any | None, str, str], Document] = partial(_text, encoding)
    contents = _contents(column.type, field, path)
    if contents == "ids":
        beside, read = MASK, _ids
    elif contents == "chat":
        beside, read = TOOLS, _chat
    else:  # bytes, because a string would be decoded and encoded again
        column = column.cast(library("pyarrow", path).large_binary())
    more = batch.column(beside) if beside in batch.schema.names else [None] * batch.num_rows
    for number, (value, extra) in enumerate(zip(column, more, strict=True), start=row):
        place = f"{path}:row {number}"
        try:
            if not value.is_valid:
                hint = "remove the row, or write an empty text"
                raise DataError(f"has no value in column {field!r}", key=place, hint=hint)
            document = read(value, extra if extra is not None and extra.is_valid else None, field, place)
        except DataError as error:
            document = Document(place, None, problem=error)
        yield document


def _ids(ids: Any, mask: Any | None, field: str, place: str) -> Document:
    """Return the document of a list of token ids, a pyarrow.ListScalar. Raises DataError if it is not usable."""
    # A null among the values makes an array of floats, which is refused.
    counted = None if mask is None else mask.values.to_numpy(zero_copy_only=False)
    return token_document(place, ids.values.to_numpy(zero_copy_only=False), counted, field)


def _chat(chat: Any, tools: Any | None, field: str, place: str) -> Document:
    """Return the document of a list of structs or a string of JSON, a pyarrow.Scalar. Raises DataError as
    `chat_document` does."""
    offered = None if tools is None else _without_nulls(tools.as_py())
    return chat_document(place, _without_nulls(chat.as_py()), offered, field)


def _text(encoding: str, text: Any, beside: Any | None, field: str, place: str) -> Document:
    """Return the document of a text, a pyarrow.LargeBinaryScalar. Raises DataError if it is not usable."""
    return Document(place, checked_text(text.as_py(), encoding, place))


@contextmanager
def damage(path: str) -> Iterator[None]:
    """Turn errors of pyarrow into a DataError that names the file, as a context."""
    pyarrow, hint = library("pyarrow", path), "write or download it again"
    try:
        yield
    except pyarrow.ArrowException as error:
        message = f"cannot be read: {str(error).splitlines()[0]}"
        raise DataError(message, key=path, hint=hint) from error
    except OSError as error:
        # pyarrow raises a plain OSError without a number for what a file contains. Others are of the file system.
        if type(error) is not OSError or error.errno is not None:
            raise
        reason = str(error).splitlines()[0] if str(error) else "its contents are damaged"
        message = "was cut off" if reason.startswith("Expected to be able to read") else f"cannot be read: {reason}"
        raise DataError(message, key=path, hint=hint) from error


def _is_list(kind: Any, path: str) -> bool:
    """Return whether a type of pyarrow is one of lists."""
    types = library("pyarrow.types", path)
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _contents(kind: Any, field: str, path: str) -> Literal["text", "ids", "chat"] | None:
    """Return what a column of a type of pyarrow contains; None if it cannot be used.

    Lists of integers are token ids. Chats are lists of structs, or strings in the column `messages`.
    """
    types = library("pyarrow.types", path)
    if _is_list(kind, path):
        return "ids" if types.is_integer(kind.value_type) else "chat" if types.is_struct(kind.value_type) else None
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind):
        return "chat" if field == MESSAGES else "text"
    return "text" if types.is_binary(kind) or types.is_large_binary(kind) else None


def _without_nulls(value: Any) -> Any:
    """Leave out keys without a value. All structs of a column have the same keys, so a null means that there is none:
    the arguments of a tool call would else have those of all other tools."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
