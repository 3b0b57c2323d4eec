"""A few kilobytes of Parquet that become gigabytes when decoded are refused before they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from engine.config.schema import Data
from engine.data.sources import columns, parquet
from engine.data.sources.formats import FORMATS
from engine.errors import DataError
from tests.data.sources.read import texts

MOST = 1 << 20  # in place of 256 MiB
REPEATED = pa.table({"text": ["x" * 50_000] * 400})
FILES: dict[str, tuple[pa.Table, dict[str, Any]]] = {
    "page": (pa.table({"text": ["x" * (20 * MOST)]}), {"use_dictionary": False}),
    "dictionary": (REPEATED, {"use_dictionary": True}),
    "prefixes": (REPEATED, {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}),
    "ids": (pa.table({"text": pa.array([np.zeros(20 * MOST, np.int8)])}), {}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_growth_is_limited(
    name: str, tmp_path: Path, make_data: Callable[..., Data], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_MOST_BYTES", MOST)
    table, options = FILES[name]
    pyarrow.parquet.write_table(table, tmp_path / "a", compression="zstd", **options)
    (block,) = FORMATS["parquet"].blocks(make_data(tmp_path / "a", format="parquet"))
    assert block.files == [f"{tmp_path}/a"] and (tmp_path / "a").stat().st_size < 10_000
    read = 0
    with pytest.raises(DataError) as caught:
        for document in block.documents():
            assert document.text is not None
            read += len(document.text)
    assert caught.value.problems[0].key == f"{tmp_path}/a" and read < 2 * MOST
    monkeypatch.setattr(parquet, "_MOST_GROWTH", 1 << 30)
    assert sum(1 for _ in block.documents()) == table.num_rows


def test_dictionaries_of_arrow_are_decoded_in_parts(
    tmp_path: Path, make_data: Callable[..., Data], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_DECODED_BYTES", 25)
    texts = [f"{number % 7}" * 5 for number in range(100)]
    table = pa.table({"text": pa.array(texts).dictionary_encode()})
    with pa.ipc.new_stream(tmp_path / "a", table.schema) as stream:
        stream.write_table(table)
    (block,) = FORMATS["arrow"].blocks(make_data(tmp_path / "a", format="arrow"))
    found = list(block.documents())
    assert [one.text for one in found] == [text.encode() for text in texts]
    assert [one.place.rpartition(" ")[2] for one in found] == [str(number) for number in range(100)]


def test_a_flat_column_may_have_a_dot_in_its_name(tmp_path: Path, make_data: Callable[..., Data]) -> None:
    """Pandas names columns so when it flattens nested rows."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"meta.text": ["one", "two"], "meta": [1, 2]}), path)
    assert texts(make_data(path, format="parquet", field="meta.text")) == [b"one", b"two"]
