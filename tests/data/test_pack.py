"""Packing gives the same files for any number of processes, and continues where it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from engine import files
from engine.config import schema
from engine.data import pack as module
from engine.data.pack import ensure_packed, pack, read_facts
from engine.data.sources import jsonl
from engine.data.token_file import TokenFile
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError, StorageError

encode = open_tokenizer("bytes").document

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]
MANY = {f"{number:03d}.txt": b"x" * (number % 7) for number in range(150)}
ENDINGS = (".bin", ".idx", ".hash", ".json")


def contents(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{ending}").read_bytes() for ending in ENDINGS]


def test_documents_are_packed_in_order(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    facts = pack(make_data(write_files(MANY)), tmp_path / "a")
    texts = [text for text in MANY.values() if text]
    packed = TokenFile.open(tmp_path / "a")
    assert [packed.read(number, 0, 100).tolist() for number in range(len(packed))] == [
        encode(t).tolist() for t in texts
    ]
    assert (facts.documents, facts.empty) == (len(texts), 150 - len(texts))
    assert facts.tokens == sum(len(text) + 2 for text in texts) == packed.tokens
    assert (facts.vocabulary, facts.bos, facts.eos) == (258, 256, 257) and packed.dtype == np.uint16
    assert read_facts(tmp_path / "a") == facts
    assert sorted(path.name for path in tmp_path.glob("a*")) == sorted(f"a{ending}" for ending in ENDINGS)


def test_any_number_of_processes_writes_the_same(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "é" * (n % 9)}) + "\n" for n in range(300)), encoding="utf-8")
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 500)
    data, reported = make_data(path, format="jsonl"), list[tuple[int, int]]()
    pack(data, tmp_path / "one", workers=1, progress=lambda done, total: reported.append((done, total)))
    pack(data, tmp_path / "two", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert reported == [(done, len(reported)) for done in range(1, len(reported) + 1)] and len(reported) > 5


def test_an_interrupted_call_is_continued(
    write_files: WriteFiles, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three blocks one fails; the next call reads only that one, and a block whose file has changed."""
    root = write_files(MANY)
    data, made = make_data(root), list[str]()
    write_block = module._pack_block

    def noted(tokens: module.Tokens, folder: Path, block: object) -> Path:
        before = set(folder.glob("*.idx"))
        part = write_block(tokens, folder, block)  # type: ignore[arg-type]
        made.extend(path.name for path in set(folder.glob("*.idx")) - before)
        return part

    monkeypatch.setattr(module, "_pack_block", noted)
    (root / "149.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="is not UTF-8"):
        pack(data, tmp_path / "a", workers=1)
    assert len(made) == 2 and not (tmp_path / "a.idx").exists()
    (root / "149.txt").write_bytes(b"fixed")
    (root / "000.txt").write_bytes(b"new")
    pack(data, tmp_path / "a", workers=1)
    assert len(made) == 4, "the first and the last block"
    pack(data, tmp_path / "b", workers=1)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert not (tmp_path / "a.parts").exists()


def test_one_process_packs_a_file(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    (tmp_path / "a.parts").mkdir()
    with (
        files.locked(tmp_path / "a.parts" / files.LOCK),
        pytest.raises(StorageError, match="another process is packing these documents"),
    ):
        pack(make_data(write_files(MANY)), tmp_path / "a")


def test_a_folder_that_cannot_be_written_is_named(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be written") as caught:
        pack(make_data(write_files(MANY)), tmp_path / "file" / "a")
    assert str(tmp_path / "file") in str(caught.value.problems[0].key)


def test_documents_are_packed_once_for_all_runs(
    write_files: WriteFiles, make_data: MakeData, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "cache_folder", lambda data: tmp_path / "cache")
    root = write_files(MANY)
    first = ensure_packed(make_data(root, validation_share=0.1), print)
    monkeypatch.setattr(module, "pack", None)
    assert ensure_packed(make_data(root, validation_share=0.2), print) == first
    monkeypatch.undo()
    monkeypatch.setattr(module, "cache_folder", lambda data: tmp_path / "cache")
    (root / "000.txt").write_bytes(b"another")
    assert ensure_packed(make_data(root), print) != first


def test_a_token_file_is_used_where_it_is(make_data: MakeData, tmp_path: Path) -> None:
    assert ensure_packed(make_data(tmp_path / "a", format="tokens"), print) == tmp_path / "a"


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2}', '{"schema": 1, "documents": 3}', "\x00"])
def test_damaged_facts_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match="does not describe a token file of this version"):
        read_facts(tmp_path / "a")
    assert read_facts(tmp_path / "b") is None
