"""Documents from the columns of Arrow's tables, which Parquet and Arrow files contain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
    """Return the columns to read of a pyarrow.Schema: `field`, and the mask beside token ids.

    Raises DataError if there is no such column, or if it contains neither texts nor lists of integers.
    """
    if field not in table.names:
        raise no_such_field(path, field, table.names, "column")
    kind = table.field(field).type
    if _is_list(kind, path):
        return [field, MASK] if MASK in table.names else [field]
    types = library("pyarrow.types", path)
    if not any(one(kind) for one in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)):
        message = f"column {field!r} has the type {kind}, which is neither text nor a list of integers"
        raise DataError(message, key=path, hint=f"set data.field to one of {', '.join(map(repr, table.names[:8]))}")
    if MASK in table.names:
        raise mask_without_ids(path, field)
    return [field]


def documents(batch: Any, field: str, encoding: str, path: str, row: int) -> Iterator[Document]:
    """Yield the documents of a pyarrow.RecordBatch, whose first row has the number `row` in messages."""
    pyarrow = library("pyarrow", path)
    column = batch.column(field)
    if _is_list(column.type, path):
        masks = batch.column(MASK) if MASK in batch.schema.names else [None] * len(column)
        for number, (ids, mask) in enumerate(zip(column, masks, strict=True), start=row):
            place = f"{path}:row {number}"
            if ids.values is None:
                raise _null(place, field)
            # A null among the values makes an array of floats, which is refused.
            counted = None if mask is None or mask.values is None else mask.values.to_numpy(zero_copy_only=False)
            yield token_document(place, ids.values.to_numpy(zero_copy_only=False), counted, field)
        return
    # Bytes, because a string would be decoded and encoded again.
    for number, scalar in enumerate(column.cast(pyarrow.large_binary()), start=row):
        place, text = f"{path}:row {number}", scalar.as_py()
        if text is None:
            raise _null(place, field)
        yield Document(place, checked_text(text, encoding, place))


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


def _null(place: str, field: str) -> DataError:
    return DataError(f"has no value in column {field!r}", key=place, hint="remove the row, or write an empty text")
