"""Blocks of every format give all documents once and in order, however the files are cut, and samples without bias."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from engine.config import schema
from engine.data import scan as scanning
from engine.data.scan import scan
from engine.data.sources import arrow, compressed, jsonl, parquet, source
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Document, usable
from engine.errors import DataError
from tests.data.sources.read import is_one_thing
from tests.refusals import refused

MakeData = Callable[..., schema.Data]
Write = Callable[[Sequence[str]], bytes]
TEXTS = ["", "é" * 7, "line\nbreak \u2028", *(f"{number} " * (number % 23) for number in range(200))]
UNSIGNED = [1, 2**63]
IDS: list[dict[str, Any]] = [
    {"input_ids": [1, 2, 257], "loss_mask": [0, 1, 1]},
    {"input_ids": [], "loss_mask": []},
    {"input_ids": [5], "loss_mask": None},
]


def lines(rows: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(row if isinstance(row, dict) else {"text": row}).encode() + b"\n" for row in rows)


def table(rows: Sequence[Any], kind: pa.DataType | None = None) -> pa.Table:
    if rows and rows[0] == {"input_ids": UNSIGNED}:  # pyarrow does not find the type of itself
        return pa.table({"input_ids": pa.array([UNSIGNED], pa.list_(pa.uint64()))})
    if rows and isinstance(rows[0], dict):
        return pa.Table.from_pylist(list(rows))
    return pa.table({"id": range(len(rows)), "text": pa.array(list(rows), kind or pa.string())})


def write_parquet(rows: Sequence[Any], **more: Any) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(table(rows), file, **({"row_group_size": 7} | more))
    return file.getvalue()


def write_arrow(rows: Sequence[Any], new: Any = pa.ipc.new_stream, options: Any = None) -> bytes:
    file, content = io.BytesIO(), table(rows, pa.large_string())
    with new(file, content.schema, options=options) as writer:
        writer.write_table(content, max_chunksize=5)  # as Hugging Face's writer does, with 1,000
    return file.getvalue()


def write_table(form: str, content: pa.Table, path: Path) -> None:
    """Write a table in two row groups or record batches."""
    if form == "parquet":
        pyarrow.parquet.write_table(content, path, row_group_size=4)
        return
    with pa.ipc.new_stream(path, content.schema) as writer:
        writer.write_table(content, max_chunksize=4)


def two_frames(rows: Sequence[Any]) -> bytes:
    text = lines(rows)
    pack = zstandard.ZstdCompressor().compress
    return pack(text[:99]) + pack(text[99:])


def long_zstd(rows: Sequence[Any]) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return packer.compress(lines(rows)) + packer.flush()


FILES: dict[str, tuple[str, Write]] = {
    "jsonl": ("jsonl", lines),
    "bom": ("jsonl", lambda rows: b"\xef\xbb\xbf" + lines(rows)),
    "gzip": ("jsonl", lambda rows: gzip.compress(lines(rows))),
    "gzip in parts": (
        "jsonl",
        lambda rows: gzip.compress(lines(rows)[:50]) + gzip.compress(lines(rows)[50:]) + b"\0" * 9,
    ),
    "zstd": ("jsonl", lambda rows: zstandard.ZstdCompressor().compress(lines(rows))),
    "zstd in frames": ("jsonl", two_frames),
    "zstd of several threads": ("jsonl", lambda rows: b"\x50\x2a\x4d\x18\4\0\0\0skip" + two_frames(rows)),  # pzstd
    "zstd with --long=31": ("jsonl", long_zstd),
    "xz": ("jsonl", lambda rows: lzma.compress(lines(rows))),
    "xz in parts": (
        "jsonl",
        lambda rows: lzma.compress(lines(rows)[:50]) + lzma.compress(lines(rows)[50:]) + b"\0" * 8,
    ),
    "bzip2": ("jsonl", lambda rows: bz2.compress(lines(rows))),
    "bzip2 in parts": ("jsonl", lambda rows: bz2.compress(lines(rows)[:50], 1) + bz2.compress(lines(rows)[50:])),
    "parquet": ("parquet", write_parquet),
    "parquet, one group": ("parquet", lambda rows: write_parquet(rows, row_group_size=1000, compression="zstd")),
    "arrow stream": ("arrow", write_arrow),
    "arrow file": ("arrow", lambda rows: write_arrow(rows, pa.ipc.new_file)),
    "arrow compressed": (
        "arrow",
        lambda rows: write_arrow(rows, pa.ipc.new_file, pa.ipc.IpcWriteOptions(compression="zstd")),
    ),
}
ALL = pytest.mark.parametrize("name", FILES)
READERS = ("jsonl", "gzip", "zstd", "parquet", "arrow stream")  # a format of each reader; tests of every format run too


def rest(chosen: Callable[[str, Any], bool], values: Sequence[Any]) -> list[Any]:
    """All formats with all values; those that are not chosen are slow."""
    pairs = product(FILES, values)
    return [pytest.param(*pair, marks=[] if chosen(*pair) else [pytest.mark.slow]) for pair in pairs]


def read(data: schema.Data) -> list[Document]:
    blocks = [pickle.loads(pickle.dumps(block)) for block in FORMATS[data.format].blocks(data)]
    return [document for block in blocks for document in usable(block)]


def texts(data: schema.Data) -> list[str]:
    return [(document.text or b"").decode() for document in read(data)]


def refusal(data: schema.Data) -> tuple[str, str | None, str | None]:
    with pytest.raises(DataError) as caught:
        read(data)
    problem = caught.value.problems[0]
    return problem.message, problem.key, problem.hint


@pytest.mark.parametrize(
    ("name", "size"),
    rest(lambda name, size: size == 64 or (name in READERS and size != 1000), [1, 64, 1000, 1 << 20]),
)
def test_blocks_of_any_size_give_all_documents_in_order(
    name: str, size: int, tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, constant in ((jsonl, "_BLOCK_BYTES"), (arrow, "_BLOCK_BYTES"), (parquet, "_BATCH_BYTES")):
        monkeypatch.setattr(module, constant, size)
    monkeypatch.setattr(compressed, "_CHUNK_BYTES", dict.fromkeys(compressed.COMPRESSED, size))
    monkeypatch.setattr(compressed, "_RESULT_BYTES", size)
    form, write = FILES[name]
    for number, part in enumerate((TEXTS[:3], TEXTS[3:150], TEXTS[150:])):
        (tmp_path / f"{number}.x").write_bytes(write(part))
    for path in (tmp_path, tmp_path / "*.x", f"{tmp_path}/[0-9].x"):
        assert texts(make_data(path, format=form)) == TEXTS
    assert texts(make_data(tmp_path / "1.x", format=form)) == TEXTS[3:150]
    if size == 64 and "one group" not in name and not {"zip", "zstd", "xz"} & {*re.findall("zip|zstd|xz", name)}:
        assert len(FORMATS[form].blocks(make_data(tmp_path, format=form))) > 20


@ALL
def test_files_behind_urls(name: str, tmp_path: Path, make_data: MakeData) -> None:
    form, write = FILES[name]
    (tmp_path / "a.x").write_bytes(write(TEXTS))
    with fsspec.open(f"memory://{tmp_path.name}/deep/a.x", "wb") as file:
        file.write(write(TEXTS))
    for root in (f"file://{tmp_path}", f"memory://{tmp_path.name}"):
        for path in (root, f"{root}/**/*.x"):
            data = make_data(path, format=form)
            assert texts(data) == TEXTS
            assert all("://" in place for place, *_ in read(data))
    assert texts(make_data(f"file://{tmp_path}/a.x", format=form)) == TEXTS


@ALL
def test_token_ids_with_a_mask(name: str, tmp_path: Path, make_data: MakeData) -> None:
    form, write = FILES[name]
    (tmp_path / "a").write_bytes(write(IDS))
    found = read(make_data(tmp_path / "a", format=form, field="input_ids"))
    assert [document.text for document in found] == [None] * 3
    assert [document.ids.tolist() for document in found if document.ids is not None] == [[1, 2, 257], [], [5]]
    assert [None if document.mask is None else document.mask.tolist() for document in found] == [
        *([False, True, True], []),
        None,
    ]
    assert scan(make_data(tmp_path / "a", format=form, field="input_ids"), None, 0).lengths.tolist() == [2]


UNUSABLE: dict[str, dict[str, Any]] = {
    "a mask of another length": {"input_ids": [1, 2], "loss_mask": [1]},
    "other values in a mask": {"input_ids": [1, 2], "loss_mask": [1, 2]},
    "a negative id": {"input_ids": [1, -100]},
    "null": {"input_ids": [1, None]},
    "booleans": {"input_ids": [True, False]},
    "a large id": {"input_ids": UNSIGNED},
    "a text with a mask": {"input_ids": "text", "loss_mask": [1]},
    "another field": {"input_id": [1]},
}
TYPED = ("null", "booleans", "a large id", "a text with a mask")  # what the type of a column shows


@pytest.mark.parametrize(
    ("name", "row"),
    rest(
        lambda name, row: name == "jsonl" or row == "a negative id" or (name in READERS[3:] and row in TYPED),
        [*UNUSABLE],
    ),
)
def test_ids_that_are_not_usable(name: str, row: str, tmp_path: Path, make_data: MakeData) -> None:
    """At their row; a column of another type is refused as a whole."""
    form, write = FILES[name]
    (tmp_path / "a").write_bytes(
        write([{"input_ids": [1], "loss_mask": None}, UNUSABLE[row]] if form == "jsonl" else [UNUSABLE[row]])
    )
    _, place, hint = refusal(make_data(tmp_path / "a", format=form, field="input_ids"))
    rows = f"{tmp_path}/a:2", f"{tmp_path}/a:row 0", f"{tmp_path}/a:batch 0:row 0"
    assert place in rows or (form != "jsonl" and row in (*TYPED, "another field") and place == f"{tmp_path}/a")
    assert hint == "did you mean data.field=input_id?" if row == "another field" else hint


@ALL
def test_what_is_no_text_is_refused(name: str, tmp_path: Path, make_data: MakeData) -> None:
    form, write = FILES[name]
    (tmp_path / "a").write_bytes(write([{"text": 7}]))
    assert "text" in refusal(make_data(tmp_path / "a", format=form))[0]
    (tmp_path / "a").write_bytes(write([{"text": "a"}, {"text": None}]))
    found, place, _ = refusal(make_data(tmp_path / "a", format=form))
    assert "'text'" in found and place in (f"{tmp_path}/a:2", f"{tmp_path}/a:row 1", f"{tmp_path}/a:batch 0:row 1")


@ALL
def test_reading_goes_on_after_documents_that_cannot_be_used(name: str, tmp_path: Path, make_data: MakeData) -> None:
    """They lie among good ones in one row group, or record batch, and keep their number."""
    form, write = FILES[name]
    good = {"input_ids": [1, 2], "loss_mask": None}
    bad = [{"input_ids": [3, -1]}, {"input_ids": [4], "loss_mask": [1, 1]}]
    (tmp_path / "a").write_bytes(write([good, bad[0], good, *bad, good]))
    blocks = FORMATS[form].blocks(make_data(tmp_path / "a", format=form, field="input_ids"))
    found = [(block, document) for block in blocks for document in block.documents()]
    assert all(is_one_thing(one) for _, one in found)
    assert [None if one.ids is None else one.ids.tolist() for _, one in found] == [
        *([1, 2], None, [1, 2], None, None, [1, 2]),
    ]
    for number, message in ((1, "contains -1"), (3, "contains -1"), (4, "has 2 values, but 'input_ids' has 1")):
        block, document = found[number]
        assert document.problem is not None and message in document.problem.problems[0].message
        assert document.text is document.mask is None and document.problem.problems[0].key == document.place
        rows = f"{tmp_path}/a:{number + 1}", f"{tmp_path}/a:row {number}", f"{tmp_path}/a:batch 0:row {number}"
        assert block.where(document.place) in rows
        assert pickle.loads(pickle.dumps(document)).problem.problems == document.problem.problems
    with pytest.raises(DataError) as caught:
        [document for block in blocks for document in usable(block)]
    assert caught.value.problems[0].key == found[1][0].where(found[1][1].place)


@ALL
def test_texts_that_cannot_be_used_among_others(name: str, tmp_path: Path, make_data: MakeData) -> None:
    form, write = FILES[name]
    (tmp_path / "a").write_bytes(write([{"text": "a"}, {"text": None}, {"text": "b"}]))
    blocks = FORMATS[form].blocks(make_data(tmp_path / "a", format=form))
    found = [document for block in blocks for document in block.documents()]
    assert all(map(is_one_thing, found))
    assert [document.text for document in found] == [b"a", None, b"b"]
    assert [document.problem is None for document in found] == [True, False, True]


COMPRESSED = ("gzip", "zstd", "xz", "bzip2", "arrow compressed")


@pytest.mark.parametrize(("name", "left"), rest(lambda name, left: left == 0.5 or name in COMPRESSED, [0.5, 0.9]))
def test_a_file_that_was_cut_off_is_refused(name: str, left: float, tmp_path: Path, make_data: MakeData) -> None:
    """A shorter corpus must not go unnoticed."""
    form, write = FILES[name]
    content = write(TEXTS)
    (tmp_path / "a").write_bytes(content[: int(len(content) * left)])
    _, place, hint = refusal(make_data(tmp_path / "a", format=form))
    assert str(place).startswith(f"{tmp_path}/a")
    assert form == "jsonl" or hint == "write or download it again"


def test_arrow_cut_off_anywhere_is_said(tmp_path: Path, make_data: MakeData) -> None:
    """Also between two messages, and before the marker of the end, where Arrow's libraries find nothing wrong."""
    content, found = write_arrow(TEXTS[:20]), set[str]()
    for size in (*range(len(content) // 2, len(content), 3), len(content) - 8):
        (tmp_path / "a").write_bytes(content[:size])
        with pytest.raises(DataError) as caught:
            read(make_data(tmp_path / "a", format="arrow"))
        assert caught.value.problems[0].hint == "write or download it again"
        found.add(caught.value.problems[0].message)
    assert {"was cut off", "was cut off, or not closed: the marker at its end is missing"} <= found
    file = write_arrow(TEXTS[:20], pa.ipc.new_file)
    (tmp_path / "a").write_bytes(file[:-6])
    assert refusal(make_data(tmp_path / "a", format="arrow"))[0].endswith("the marker at its end is missing")


@pytest.mark.parametrize("name", [pytest.param("gzip", marks=pytest.mark.long), "parquet", "arrow stream"])
def test_a_sample_has_no_bias(name: str, tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(source, "_PILOT_BYTES", 1000)
    monkeypatch.setattr(scanning, "cores", lambda: 1)
    form, write = FILES[name]
    for number in range(30):
        (tmp_path / f"{number:02d}").write_bytes(write(["a" * (5 if number < 20 else 90)] * 10))
    data = make_data(tmp_path, format=form)
    found = [scan(data, 50, seed) for seed in range(40)]
    assert np.mean([len(some.lengths) for some in found]) == pytest.approx(50, rel=0.35)
    share = np.mean([(some.lengths == 6).mean() for some in found])
    assert share == pytest.approx(2 / 3, rel=0.1)
    assert scan(data, 10_000, seed=0).fraction == 1.0 == scan(data, None, seed=0).fraction
    monkeypatch.setattr(source, "_MOST_BYTES", 500)
    assert scan(data, None, seed=0).fraction < 0.5


def test_parquet_reads_no_more_than_its_columns_and_row_group(tmp_path: Path, make_data: MakeData) -> None:
    """The other column and the other row group are damaged, which nobody notices."""
    rows = [{"other": "x" * 1000 + str(n), "text": f"text {n}" * 50} for n in range(4)]
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pa.Table.from_pylist(rows), file, row_group_size=2, compression="none", use_dictionary=False
    )
    content = bytearray(file.read_bytes())
    meta = pyarrow.parquet.ParquetFile(file).metadata
    for group, column in ((0, 0), (0, 1), (1, 0)):
        chunk = meta.row_group(group).column(column)
        content[chunk.data_page_offset : chunk.data_page_offset + chunk.total_compressed_size] = bytes(
            chunk.total_compressed_size
        )
    file.write_bytes(content)
    first, second = FORMATS["parquet"].blocks(make_data(tmp_path, format="parquet"))
    assert [document.text for document in second.documents()] == [row["text"].encode() for row in rows[2:]]
    with refused(DataError, f"{tmp_path}/a.parquet"):
        list(first.documents())


def test_binary_columns_follow_the_encoding(tmp_path: Path, make_data: MakeData) -> None:
    pyarrow.parquet.write_table(pa.table({"text": [b"good", b"caf\xe9 noir"]}), tmp_path / "a.parquet")
    expected = ("is not UTF-8 at byte 3", f"{tmp_path}/a.parquet:row 1", "data.encoding=bytes accepts any file")
    assert refusal(make_data(tmp_path, format="parquet")) == expected
    found = read(make_data(tmp_path, format="parquet", encoding="bytes"))
    assert [document.text for document in found] == [b"good", b"caf\xe9 noir"]


@pytest.mark.parametrize(("ids", "fine"), [([1, True], False), ([True], False), ([1, 0], True)])
def test_booleans_are_masks_and_no_ids(ids: list[int], fine: bool, tmp_path: Path, make_data: MakeData) -> None:
    """numpy makes integers of a list of both."""
    data = make_data(tmp_path / "a", format="jsonl", field="input_ids")
    (tmp_path / "a").write_bytes(lines([{"input_ids": ids, "loss_mask": [True, 0][: len(ids)]}]))
    if not fine:
        assert refusal(data)[0] == "'input_ids' is not a list of integers"
        return
    (found,) = read(data)
    assert found.mask is not None and found.mask.tolist() == [True, False]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_columns_of_masks(form: str, tmp_path: Path, make_data: MakeData) -> None:
    """One with nothing but nulls has the type null; one with texts is no mask."""
    write = write_parquet if form == "parquet" else write_arrow
    data = make_data(tmp_path / "a", format=form, field="input_ids")
    (tmp_path / "a").write_bytes(write([{"input_ids": [1, 2], "loss_mask": None}]))
    (found,) = read(data)
    assert found.ids is not None and found.ids.tolist() == [1, 2] and found.mask is None
    (tmp_path / "a").write_bytes(write([{"input_ids": [1, 2], "loss_mask": "1 1"}]))
    assert refusal(data)[:2] == ("column 'loss_mask' has the type string, which is not a list of integers", data.path)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_columns_of_the_same_name(form: str, tmp_path: Path, make_data: MakeData) -> None:
    """They are refused if they would be read."""

    def content(names: list[str]) -> pa.Table:
        return pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], names=names)

    data = make_data(tmp_path / "a", format=form)
    write_table(form, content(["text", "id", "text"]), tmp_path / "a")
    assert refusal(data) == (
        "has 2 columns named 'text'",
        data.path,
        "rename or remove all but one, and write it again",
    )
    write_table(form, content(["id", "text", "id"]), tmp_path / "a")
    assert texts(data) == ["b"]
    ids = pa.Table.from_arrays([pa.array([[1]])] * 3, names=["input_ids", "loss_mask", "loss_mask"])
    write_table(form, ids, tmp_path / "a")
    data = make_data(tmp_path / "a", format=form, field="input_ids")
    assert refusal(data)[0] == "has 2 columns named 'loss_mask'"


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_columns_that_cannot_be_used(form: str, tmp_path: Path, make_data: MakeData) -> None:
    """The hint names only those that can."""
    content = pa.table(
        {"text": [1.5], "score": [1], "body": ["a"], "loss_mask": [[1]], "flags": [[True]], "ids": [[1]]}
    )
    write_table(form, content, tmp_path / "a")
    message, _, hint = refusal(make_data(tmp_path / "a", format=form))
    assert "column 'text' has the type double" in message and hint == "set data.field to one of 'body', 'ids'"
    assert "list" in refusal(make_data(tmp_path / "a", format=form, field="flags"))[0]
    write_table(form, pa.table({"text": [1.5], "score": [1]}), tmp_path / "a")
    assert refusal(make_data(tmp_path / "a", format=form))[2] == "no other column is"


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_dictionaries_and_lists_of_a_fixed_size(form: str, tmp_path: Path, make_data: MakeData) -> None:
    pairs = pa.array([[1, 2], [3, 4]] * 3, pa.list_(pa.int32(), 2))
    masks = pa.array([[True, False]] * 6, pa.list_(pa.bool_(), 2))
    content = pa.table({"text": pa.array(["a", "é"] * 3).dictionary_encode(), "input_ids": pairs})
    write_table(form, content, tmp_path / "a")
    assert texts(make_data(tmp_path / "a", format=form)) == ["a", "é"] * 3
    write_table(form, pa.table({"input_ids": pairs, "loss_mask": masks}), tmp_path / "a")
    found = read(make_data(tmp_path / "a", format=form, field="input_ids"))
    assert [one.ids.tolist() for one in found if one.ids is not None] == [[1, 2], [3, 4]] * 3
    assert [one.mask.tolist() for one in found if one.mask is not None] == [[True, False]] * 6


def test_a_folder_of_save_to_disk(tmp_path: Path, make_data: MakeData) -> None:
    """Results of later calls lie in the same folder, and a DatasetDict has a folder per split."""
    train = tmp_path / "train"
    train.mkdir()
    for number, part in enumerate((TEXTS[:90], TEXTS[90:])):
        (train / f"data-0000{number}-of-00002.arrow").write_bytes(write_arrow(part))
    (train / "cache-0123456789abcdef.arrow").write_bytes(write_arrow(["of map"]))
    names = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
    (train / "state.json").write_text(json.dumps({"_data_files": names, "_split": "train"}))
    (train / "dataset_info.json").write_text("{}")
    data = make_data(train, format="arrow", pattern="**/*.arrow")
    assert texts(data) == TEXTS
    assert len(texts(make_data(train / "*.arrow", format="arrow"))) == len(TEXTS) + 1  # a glob means what it says
    (tmp_path / "more.arrow").write_bytes(write_arrow(["more"]))
    several = (f"{tmp_path}/more.arrow", str(train))
    assert texts(make_data(several, format="arrow", pattern="**/*.arrow")) == ["more", *TEXTS]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    expected = ("has several splits: test, train", str(tmp_path), f"set data.path={train}")
    assert refusal(make_data(tmp_path, format="arrow", pattern="**/*.arrow")) == expected


def test_arrow_with_dictionaries_is_one_block(tmp_path: Path, make_data: MakeData) -> None:
    file = tmp_path / "a.arrow"
    content = pa.table({"text": TEXTS, "label": pa.array(TEXTS).dictionary_encode()})
    with pa.ipc.new_stream(file, content.schema) as writer:
        writer.write_table(content, max_chunksize=5)
    assert texts(make_data(file, format="arrow")) == TEXTS


def test_arrow_with_its_schema_in_the_footer_alone(tmp_path: Path, make_data: MakeData) -> None:
    """Polars writes no message with the schema before the record batches."""
    content = write_arrow(TEXTS, pa.ipc.new_file)
    stream = pa.BufferReader(content)
    stream.seek(8)
    pa.ipc.read_message(stream)
    (tmp_path / "a.arrow").write_bytes(
        content[:8] + content[16 : stream.tell()] + b"\4\0\0\0" * 2 + content[stream.tell() :]
    )
    assert texts(make_data(tmp_path / "a.arrow", format="arrow")) == TEXTS
    assert len(FORMATS["arrow"].blocks(make_data(tmp_path / "a.arrow", format="arrow"))) == 1


def test_an_unknown_column_is_refused_before_anything_is_read(tmp_path: Path, make_data: MakeData) -> None:
    for form, content in (("parquet", write_parquet(TEXTS)), ("arrow", write_arrow(TEXTS))):
        (tmp_path / form).write_bytes(content)
        for field, hint in (
            ("texts", "did you mean data.field=text?"),
            ("body", "set data.field=text"),
        ):
            with pytest.raises(DataError) as caught:
                FORMATS[form].blocks(make_data(tmp_path / form, format=form, field=field))
            problem = caught.value.problems[0]
            assert (problem.message, problem.key, problem.hint) == (
                f"has no column '{field}'",
                f"{tmp_path}/{form}",
                hint,
            )


@pytest.mark.parametrize(
    ("name", "needed"), [("zstd", "zstandard"), ("parquet", "pyarrow"), ("arrow stream", "pyarrow")]
)
def test_a_missing_library_is_named(
    name: str, needed: str, tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, write = FILES[name]
    (tmp_path / "a").write_bytes(write(TEXTS))
    for module in (needed, f"{needed}.parquet", f"{needed}.ipc"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    message, place, hint = refusal(make_data(tmp_path / "a", format=form))
    assert message == f"cannot be read without the library {needed}"
    assert (place, hint) == (f"{tmp_path}/a", f"install it: pip install {needed}")


def test_a_url_of_an_unknown_protocol_is_refused(make_data: MakeData) -> None:
    message, place, _ = refusal(make_data("nowhere://a/b.jsonl", format="jsonl"))
    assert "nowhere" in message and place == "nowhere://a/b.jsonl"


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow"])
def test_paths_without_files_are_refused(form: str, tmp_path: Path, make_data: MakeData) -> None:
    for root in (str(tmp_path), f"file://{tmp_path}"):
        data = make_data(root, format=form, pattern="**/*.x")
        (tmp_path / "a.y").unlink(missing_ok=True)
        assert refusal(data)[:2] == ("contains no files", root)
        (tmp_path / "a.y").write_bytes(b"a")
        assert refusal(data)[:2] == ("contains no files that match '**/*.x'", root)
        message, key, hint = refusal(make_data(f"{root}/*.x", format=form))
        assert (message, key) == ("matches no files", f"{root}/*.x") and "correct the glob" in str(hint)
        for path in (f"{root}/none", f"{root}/none/*.x"):
            assert refusal(make_data(path, format=form))[:2] == ("no such file or folder", path)
