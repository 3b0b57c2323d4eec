"""The list of blocks in a run folder gives the same blocks in another process, and runs no code."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from engine.config import schema
from engine.data.block_files import read_blocks, write_blocks
from engine.data.parts import Tokens, part_path
from engine.data.sources import arrow, folder, jsonl
from engine.data.sources.formats import FORMATS
from engine.errors import DataError
from tests.refusals import refused

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]
LINES = b'{"text": "one"}\n{"text": "two"}\n' * 9


@pytest.mark.parametrize("form", FORMATS)
def test_blocks_are_the_same_in_another_process(
    form: str, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of files whose names are not UTF-8, or that are relative. Their names in the cache are the same."""
    for module, constant in ((folder, "_BLOCK_FILES"), (jsonl, "_BLOCK_BYTES"), (arrow, "_BLOCK_BYTES")):
        monkeypatch.setattr(module, constant, 2)
    monkeypatch.chdir(tmp_path)
    table, top = pa.table({"text": ["one", "two"]}), Path("texts")
    top.mkdir()
    for name in (b"a\n\xe9.txt", "é b".encode(), b"c"):
        path = Path(os.fsdecode(b"texts/" + name))
        if form == "parquet":
            pyarrow.parquet.write_table(table, tmp_path / "table", row_group_size=1)
            (tmp_path / "table").rename(path)
        elif form == "arrow":
            with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=1)
        else:
            path.write_bytes(LINES if form == "jsonl" else name)
    for where in (top, tmp_path / "texts"):
        blocks = {"web": FORMATS[form].blocks(make_data(where, format=form, pattern="*")), "code": []}
        write_blocks(tmp_path / "blocks", blocks, "f")
        found, tokenizer = read_blocks(tmp_path / "blocks")
        assert tokenizer == "f"
        assert found == blocks and list(found) == ["web", "code"] and len(found["web"]) > 1
        tokens = Tokens("bytes", None, None)
        for one, other in zip(blocks["web"], found["web"], strict=True):
            assert repr(one) == repr(other)
            assert part_path(tokens, tmp_path, one) == part_path(tokens, tmp_path, other)
            assert [document.text for document in other.documents()] == [one.text for one in one.documents()]


class Deadly:
    """Creates a file when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("created",)


def test_no_code_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder may be someone else's."""
    monkeypatch.chdir(tmp_path)
    Path("blocks").write_bytes(pickle.dumps(Deadly()))
    with refused(DataError, "blocks"):
        read_blocks(Path("blocks"))
    assert not Path("created").exists()


FIRST = {"sources": ["web"], "tokenizer": None}
BLOCK = {"path": "a", "field": "text", "ranges": [[0, 9]], "length": 9, "read_lately": "", "transform": ""}
assert {one.name for one in fields(jsonl.JsonlBlock)} == {*BLOCK}


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["no JSON"],
        [{"sources": ["web"]}],
        [FIRST, ["web", "NoBlock", BLOCK]],
        [FIRST, ["web", "JsonlBlock", BLOCK | {"more": 1}]],
        [FIRST, ["web", "JsonlBlock", {"path": "a"}]],
        [FIRST, ["code", "JsonlBlock", BLOCK]],
        [FIRST, ["web", "JsonlBlock"]],
        [FIRST, ["web", "JsonlBlock", "a"]],
        [FIRST, ["web", ["JsonlBlock"], BLOCK]],
    ],
)
def test_lists_of_other_versions_are_refused(lines: list[object], tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    path.write_text("\n".join(map(json.dumps, lines)))
    with refused(DataError, f"{tmp_path}/blocks") as problems:
        read_blocks(path)
    assert problems[0].key == str(path) and "resume the run" in str(problems[0].hint)


def test_a_path_is_there_once(tmp_path: Path) -> None:
    """A file of 100 GB has 100,000 blocks."""
    blocks = [jsonl.JsonlBlock("long/path" * 9, "text", ((at, at + 1),), 1) for at in range(3)]
    write_blocks(tmp_path / "blocks", {"web": blocks}, None)
    found = read_blocks(tmp_path / "blocks")[0]["web"]
    assert len({id(vars(block)["path"]) for block in found}) == 1


def test_names_of_files_take_little_memory(tmp_path: Path) -> None:
    """Each process of a run has those of all files: a string for each would take five times their length."""
    names = [f"{number:05}/{number:010}" for number in range(64 * 200)]
    listed = ["\0".join(names[at : at + 64]) for at in range(0, len(names), 64)]
    write_blocks(
        tmp_path / "blocks", {"web": [folder.FolderBlock("root", one, "utf-8", False, None, 1) for one in listed]}, None
    )
    read_blocks(tmp_path / "blocks")  # what is read first fills caches
    tracemalloc.start()
    found, _ = read_blocks(tmp_path / "blocks")
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [name for block in found["web"] for name in block.files] == [f"root/{name}" for name in names]
    assert used < 2 * sum(map(len, names))
