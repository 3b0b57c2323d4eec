"""Columns of all types of Arrow that are text, lists of integers, or chats."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from engine.config.schema import Data
from tests.data.sources.read import documents as read

TEXTS = ["one two", "three", "é"]
IDS = [[1, 2], [3, 4], [5, 120]]
CHATS = [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]] * 3
MESSAGE = pa.struct({"role": pa.string_view(), "content": pa.large_string()})
INTEGERS = (pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64())
WRAPPERS: tuple[Callable[[Any], Any], ...] = (
    pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda kind: pa.list_(kind, 2)
)  # fmt: skip


def dictionary(values: Any) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.uint8()), values)


def runs(values: Any) -> Any:
    return pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3], pa.int32()), values)


COLUMNS: dict[str, tuple[str, Any]] = {
    **{str(kind): ("text", pa.array(TEXTS, kind)) for kind in (pa.string(), pa.large_string(), pa.string_view())},
    **{
        str(kind): ("text", pa.array([text.encode() for text in TEXTS], kind))
        for kind in (pa.binary(), pa.large_binary(), pa.binary_view())
    },
    **{f"list of {kind}": ("ids", pa.array(IDS, pa.list_(kind))) for kind in INTEGERS},
    **{str(wrap(pa.uint16())): ("ids", pa.array(IDS, wrap(pa.uint16()))) for wrap in WRAPPERS},
    **{str(wrap(MESSAGE)): ("messages", pa.array(CHATS, wrap(MESSAGE))) for wrap in WRAPPERS},
    "JSON": ("text", pa.array(TEXTS, pa.json_())),
    "chats in JSON": ("messages", pa.array([str(chat).replace("'", '"') for chat in CHATS], pa.json_())),
    "dictionary of texts": ("text", dictionary(pa.array(TEXTS))),
    "dictionary of views": ("text", dictionary(pa.array(TEXTS, pa.string_view()))),
    "dictionary of lists": ("ids", dictionary(pa.array(IDS))),
    "list of a dictionary": ("ids", pa.array(IDS, pa.list_(pa.dictionary(pa.int8(), pa.int32())))),
    "tensors": (
        "ids",
        pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int32(), [2]), pa.array(IDS, pa.list_(pa.int32(), 2))),
    ),
    "runs of texts": ("text", runs(pa.array(TEXTS))),
    "runs of views": ("text", runs(pa.array(TEXTS, pa.string_view()))),
}


def both(name: str) -> bool:
    """Whether the readers of Parquet and Arrow differ in what they make of a type."""
    return "list" in name or "view" in name or "dictionary" in name


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param(form, name, marks=[] if form == "arrow" or both(name) else [pytest.mark.slow])
        for form, name in product(["parquet", "arrow"], COLUMNS)
    ],
)
def test_every_type_of_text_ids_and_chats_is_read(
    name: str, form: str, tmp_path: Path, make_data: Callable[..., Data]
) -> None:
    """Polars writes string_view, other tools other types. Those that Parquet does not hold are in Arrow files only."""
    field, column = COLUMNS[name]
    table = pa.table({field: column, "id": [1, 2, 3]})
    if form == "parquet":
        try:
            pyarrow.parquet.write_table(table, tmp_path / "a")
        except pa.ArrowNotImplementedError:
            pytest.skip("Parquet files do not have columns of this type")
    else:
        with pa.ipc.new_stream(tmp_path / "a", table.schema) as stream:
            stream.write_table(table)
    found = read(make_data(tmp_path / "a", format=form, field=field))
    if field == "text":
        assert [one.text for one in found] == [text.encode() for text in TEXTS]
    elif field == "ids":
        assert [None if one.ids is None else one.ids.tolist() for one in found] == IDS
        assert all(one.ids is not None and one.ids.dtype == np.int64 for one in found)
    else:
        assert [one.messages for one in found] == CHATS


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_masks_may_be_lists_of_any_type(
    wrap: Callable[[Any], Any], tmp_path: Path, make_data: Callable[..., Data]
) -> None:
    table = pa.table({"ids": IDS, "loss_mask": pa.array([[0, 1]] * 3, wrap(pa.uint8()))})
    with pa.ipc.new_stream(tmp_path / "a", table.schema) as stream:
        stream.write_table(table)
    found = read(make_data(tmp_path / "a", format="arrow", field="ids"))
    assert [None if one.mask is None else one.mask.tolist() for one in found] == [[False, True]] * 3
