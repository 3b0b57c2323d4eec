"""Documents from the columns of Arrow's tables, which Parquet and Arrow files contain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

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

    Raises DataError if there is no such column, or if it contains neither texts nor token ids nor chats.
    """
    if field not in table.names:
        raise no_such_field(path, field, table.names, "column")
    kind = table.field(field).type
    types = library("pyarrow.types", path)
    if _is_list(kind, path):
        mask = table.field(MASK).type if MASK in table.names else None
        if mask is not None and not (types.is_list(mask) or types.is_large_list(mask) or types.is_null(mask)):
            message = f"column {MASK!r} has the type {mask}, which is not a list of integers"
            raise DataError(message, key=path, hint="write one value per id, 0 or 1")
        return [field] if mask is None else [field, MASK]
    texts = any(one(kind) for one in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary))
    chats = _has_chats(kind, field, path)
    if not (texts or chats):
        message = f"column {field!r} has the type {kind}, which is neither text nor token ids nor a list of messages"
        raise DataError(message, key=path, hint=f"set data.field to one of {', '.join(map(repr, table.names[:8]))}")
    if MASK in table.names:
        raise mask_without_ids(path, field, "chat" if chats else "text")
    return [field, TOOLS] if chats and TOOLS in table.names else [field]


def documents(batch: Any, field: str, encoding: str, path: str, row: int) -> Iterator[Document]:
    """Yield the documents of a pyarrow.RecordBatch, whose first row has the number `row` in messages."""
    column, beside = batch.column(field), ""
    read: Callable[[Any, Any | None, str, str], Document] = partial(_text, encoding)
    if _is_list(column.type, path):
        beside, read = MASK, _ids
    elif _has_chats(column.type, field, path):
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
    pyarrow = library("pyarrow", path)
    try:
        yield
    except pyarrow.ArrowException as error:
        message = f"cannot be read: {str(error).splitlines()[0]}"
        raise DataError(message, key=path, hint="write or download it again") from error


def _is_list(kind: Any, path: str) -> bool:
    """Return whether a type of pyarrow is a list of integers or booleans."""
    types = library("pyarrow.types", path)
    if not (types.is_list(kind) or types.is_large_list(kind)):
        return False
    return bool(types.is_integer(kind.value_type) or types.is_boolean(kind.value_type))


def _has_chats(kind: Any, field: str, path: str) -> bool:
    """Return whether a column of a type of pyarrow contains chats: lists of structs, or strings in `messages`."""
    types = library("pyarrow.types", path)
    if types.is_list(kind) or types.is_large_list(kind):
        return bool(types.is_struct(kind.value_type))
    return field == MESSAGES and bool(types.is_string(kind) or types.is_large_string(kind))


def _without_nulls(value: Any) -> Any:
    """Leave out keys without a value. All structs of a column have the same keys, so a null means that there is none:
    the arguments of a tool call would else have those of all other tools."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
