"""Documents from the columns of Arrow's tables, which Parquet and Arrow files contain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from engine.data.sources.chat import MESSAGES
from engine.data.sources.library import library
from engine.data.sources.rows import (
    choose_field,
    chosen_field,
    fields_beside,
    mask_without_ids,
    no_such_field,
    read_lately,
    row_document,
    shape_of,
)
from engine.data.sources.source import Document, checked_text
from engine.data.sources.token_ids import LOSS_MASK, MASKS
from engine.errors import DataError

_DECODED_BYTES = 256 << 20  # of a dictionary to decode at a time, at most


def columns(table: Any, field: str, path: str) -> list[str]:
    """Return the columns to read of a pyarrow.Schema: `field`, or those of a known shape, and those that belong to it.

    Raises DataError if there is no such column, or several, or if it contains neither texts nor token ids nor chats.
    """
    # Only the needed columns are read: a Parquet file stores columns separately, so the others cost nothing.
    names, shape = table.names, shape_of(field)
    usable = [one.name for one in table if one.name not in MASKS and _contents(one.type, one.name, path) is not None]

    def kind_of(name: str) -> Any:
        if names.count(name) > 1:  # pyarrow finds none by a name that several have
            message = f"has {names.count(name)} columns named {name!r}"
            raise DataError(message, key=path, hint="rename or remove all but one, and write it again")
        return table.field(name).type

    # `data.field` may name a shape, such as Alpaca's, which has several columns.
    if field not in names:
        wanted = (field,) if shape is None or shape.read is None else shape.fields
        if missing := [name for name in wanted if name not in names]:
            raise no_such_field(path, missing[0], usable, "column")
        assert shape is not None
        found = [*wanted, *(name for name in shape.beside if name in names)]
    else:
        contents = _contents(kind_of(field), field, path)
        if contents is None:
            what = "neither text nor token ids nor a list of messages"
            hint = choose_field(usable) if usable else "no other column is"
            raise DataError(f"column {field!r} has the type {kind_of(field)}, which is {what}", key=path, hint=hint)
        if contents != "ids" and LOSS_MASK in names:
            raise mask_without_ids(path, field, contents)
        found = [field, *(name for name in fields_beside(field, contents) if name in names and name != field)]
    # Types of masks are known from the schema, so a wrong one is reported once for the file instead of for each row.
    for name in found:
        kind = _plain(kind_of(name), path)
        is_list = _is_list(kind, path) or library("pyarrow.types", path).is_null(kind)
        if name in MASKS and name != field and not is_list:
            message = f"column {name!r} has the type {kind}, which is not a list of integers"
            raise DataError(message, key=path, hint="write one value per id, or remove the column")
    return found


def read_lately_in(table: Any, field: str, path: str) -> str:
    """Return what decides the documents of a pyarrow.Schema that the first versions did not read; see `read_lately`."""
    if field not in table.names:
        return ""
    types, kind = library("pyarrow.types", path), _plain(table.field(field).type, path)
    beside = [name for name in columns(table, field, path)[1:] if not types.is_null(table.field(name).type)]
    inner = _plain(kind.value_type, path) if _is_list(kind, path) else None
    return read_lately(field, beside, [one.name for one in inner] if inner and types.is_struct(inner) else [])


def column_of(table: Any, field: str, path: str) -> str:
    """Return what `data.field` is for a file with a pyarrow.Schema; see `chosen_field`."""
    return chosen_field({one.name: _is_list(_plain(one.type, path), path) for one in table}, field, path)


def documents(batch: Any, names: Sequence[str], field: str, encoding: str, path: str, row: int) -> Iterator[Document]:
    """Yield the documents of a pyarrow.RecordBatch, whose first row has the number `row` in messages.

    `names` are the columns to read, as `columns` returns them. Rows with a dictionary are read some at a time, because
    a dictionary of one long text can have any number of rows.
    """
    types, step = library("pyarrow.types", path), batch.num_rows
    for column in map(batch.column, names):
        if types.is_dictionary(column.type):
            step = min(step, max(1, _DECODED_BYTES // max(1, column.dictionary.nbytes)))
    for first in range(0, batch.num_rows, step or 1):
        yield from _rows(batch.slice(first, step), names, field, encoding, path, row + first)


def _rows(batch: Any, names: Sequence[str], field: str, encoding: str, path: str, row: int) -> Iterator[Document]:
    """Yield the documents of some rows, all of which are decoded."""
    arrays = [_values(batch.column(name), path) for name in names]
    text = [*names] == [field] and _contents(arrays[0].type, field, path) == "text"
    if text:  # bytes, because a string would be decoded and encoded again
        arrays = [arrays[0].cast(library("pyarrow", path).large_binary())]
    for number, values in enumerate(zip(*arrays, strict=True), start=row):
        place = f"{path}:row {number}"
        found = {name: value for name, value in zip(names, values, strict=True) if value.is_valid}
        try:
            if field in names and field not in found:
                hint = "remove the row, or write an empty text"
                raise DataError(f"has no value in column {field!r}", key=place, hint=hint)
            if text:
                document = Document(place, checked_text(found[field].as_py(), encoding, place))
            else:
                document = row_document({name: _value(one, place) for name, one in found.items()}, field, place)
        except DataError as error:
            document = Document(place, None, problem=error)
        yield document


def _value(value: Any, place: str) -> Any:
    """Return the value of a pyarrow.Scalar: a list of numbers as an array, others as values of JSON."""
    types = library("pyarrow.types", place)
    if _is_list(value.type, place) and types.is_primitive(_plain(value.type.value_type, place)):
        # A null among the values makes an array of floats, which is rejected.
        return _values(value.values, place).to_numpy(zero_copy_only=False)
    try:
        return _without_nulls(value.as_py())
    except UnicodeDecodeError as error:
        raise DataError("is not UTF-8", key=place, hint="convert the text to UTF-8") from error


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
        # pyarrow raises a plain OSError, without a number, for faults in the contents of a file. Others come from the
        # file system.
        if type(error) is not OSError or error.errno is not None:
            raise
        reason = str(error).splitlines()[0] if str(error) else "its contents are damaged"
        message = "was cut off" if reason.startswith("Expected to be able to read") else f"cannot be read: {reason}"
        raise DataError(message, key=path, hint=hint) from error


def _is_list(kind: Any, path: str) -> bool:
    """Return whether a type of pyarrow is one of lists."""
    types = library("pyarrow.types", path)
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return any(test(kind) for test in tests)


def _plain(kind: Any, path: str) -> Any:
    """Return the type of the values of a type of pyarrow that stores others: a dictionary, runs, an extension."""
    types, pyarrow = library("pyarrow.types", path), library("pyarrow", path)
    while True:
        if isinstance(kind, pyarrow.BaseExtensionType):  # such as JSON, which is text
            kind = kind.storage_type
        elif types.is_dictionary(kind) or types.is_run_end_encoded(kind):
            kind = kind.value_type
        else:
            return kind


def _values(column: Any, path: str) -> Any:
    """Return the values of a pyarrow.Array as one of the type `_plain`."""
    types, pyarrow = library("pyarrow.types", path), library("pyarrow", path)

    def without_views(values: Any) -> Any:
        """Return texts in one buffer: pyarrow cannot decode a dictionary of views, or runs of them."""
        if types.is_string_view(values.type):
            return values.cast(pyarrow.large_string())
        return values.cast(pyarrow.large_binary()) if types.is_binary_view(values.type) else values

    while True:
        if isinstance(column.type, pyarrow.BaseExtensionType):
            column = column.storage
        elif types.is_dictionary(column.type):
            dictionary = without_views(column.dictionary)
            column = pyarrow.DictionaryArray.from_arrays(column.indices, dictionary).dictionary_decode()
        elif types.is_run_end_encoded(column.type):
            runs = pyarrow.RunEndEncodedArray.from_arrays(column.run_ends, without_views(column.values))
            column = library("pyarrow.compute", path).run_end_decode(runs.slice(column.offset, len(column)))
        else:
            return column


def _contents(kind: Any, field: str, path: str) -> Literal["text", "ids", "chat"] | None:
    """Return the kind of contents of a column with a pyarrow type; None if it cannot be used.

    Lists of integers are token ids. Chats are lists of structs, or strings in the column `messages`.
    """
    types, kind = library("pyarrow.types", path), _plain(kind, path)
    if _is_list(kind, path):
        inner = _plain(kind.value_type, path)
        return "ids" if types.is_integer(inner) else "chat" if types.is_struct(inner) else None
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "chat" if field == MESSAGES else "text"
    binary = (types.is_binary, types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary)
    return "text" if any(test(kind) for test in binary) else None


def _without_nulls(value: Any) -> Any:
    """Leave out keys without a value. All structs of a column have the same keys, so a null means that there is none:
    the arguments of a tool call would else have those of all other tools."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
