"""Packing gives the same files for any number of processes, and continues where it was interrupted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from engine import files
from engine.config import schema
from engine.data import pack as module
from engine.data import parts
from engine.data.corpus import TokenCorpus
from engine.data.pack import pack
from engine.data.parts import Tokens, pack_block, part_path
from engine.data.sources import jsonl
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Block
from engine.data.token_facts import blocks_path, facts_path, hashes_path, read_facts
from engine.data.token_file import TokenFile, mask_path
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import ConfigError, DataError, StorageError
from tests.data.packed import TOKENS, documents
from tests.data.reading import text_corpus
from tests.refusals import refused

encode = open_tokenizer("bytes").document

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]
MANY = {f"{number:03d}.txt": b"x" * (number % 7) for number in range(150)}
ENDINGS = (".bin", ".idx", ".hash", ".blocks", ".json")


def contents(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{ending}").read_bytes() for ending in ENDINGS]


def test_documents_are_packed_in_order(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    facts = pack(make_data(write_files(MANY)), tmp_path / "a")
    texts = [text for text in MANY.values() if text]
    packed = TokenFile.open(tmp_path / "a")
    assert documents(tmp_path / "a") == [encode(text).tolist() for text in texts]
    assert (facts.documents, facts.empty) == (len(texts), 150 - len(texts))
    assert facts.tokens == sum(len(text) + 2 for text in texts) == packed.tokens
    assert (facts.vocabulary, facts.bos, facts.eos) == (258, 256, 257) and packed.dtype == np.uint16
    assert read_facts(tmp_path / "a") == facts
    assert sorted(path.name for path in tmp_path.glob("a*")) == sorted(f"a{ending}" for ending in ENDINGS)


def test_blocks_are_those_of_the_texts(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    """Otherwise a token file would have another order of training than its texts."""
    data = make_data(write_files(MANY))
    blocks = FORMATS["folder"].blocks(data)
    pack(data, tmp_path / "a")
    first, sizes = np.fromfile(blocks_path(tmp_path / "a"), dtype="<i8").reshape(-1, 2).T.tolist()
    assert sizes == [*(block.size for block in blocks), 0] and sum(sizes) == sum(map(len, MANY.values()))
    counts = [sum(bool(document.text) for document in block.documents()) for block in blocks]
    assert first == np.cumsum([0, *counts]).tolist() and len(blocks) == 3


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
    data, made = make_data(root), list[Path]()
    write_block = parts._write_block

    def noted(tokens: Tokens, part: Path, block: Block) -> None:
        write_block(tokens, part, block)
        made.append(part)

    monkeypatch.setattr(parts, "_write_block", noted)
    (root / "149.txt").write_bytes(b"\xff")
    with refused(DataError, f"{tmp_path}/documents/149.txt"):
        pack(data, tmp_path / "a", workers=1)
    assert len(made) == 2 and not (tmp_path / "a.idx").exists()
    (root / "149.txt").write_bytes(b"fixed")
    (root / "000.txt").write_bytes(b"new")
    pack(data, tmp_path / "a", workers=1)
    assert len(made) == 4, "the first and the last block"
    pack(data, tmp_path / "b", workers=1)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert not (tmp_path / "a.parts").exists()


@pytest.mark.parametrize("at", ["join", "publish"])
def test_a_file_that_cannot_be_finished_describes_no_other_documents(
    at: str, write_files: WriteFiles, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the new files are complete the old ones stay. While they are renamed there is no PREFIX.json."""
    root = write_files(MANY)
    pack(make_data(root), tmp_path / "a")
    before = contents(tmp_path / "a")
    (root / "000.txt").write_bytes(b"another")

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device", "a.bin")

    replace = Path.replace

    def full_at_index(path: Path, target: str) -> Path:
        return full() if str(target) == f"{tmp_path / 'a'}.idx" else replace(path, target)  # type: ignore[return-value]

    with monkeypatch.context() as patch:
        patch.setattr(module, "concatenate", full) if at == "join" else patch.setattr(Path, "replace", full_at_index)
        with pytest.raises(StorageError, match="cannot be written: No space left on device"):
            pack(make_data(root), tmp_path / "a", workers=1)
    if at == "join":
        assert contents(tmp_path / "a") == before and len(TokenCorpus("data", tmp_path / "a", 0.0).tokens) == 128
    else:
        with refused(DataError, f"{tmp_path}/a"):
            TokenCorpus("data", tmp_path / "a", 0.0)
    pack(make_data(root), tmp_path / "a", workers=1)
    assert documents(tmp_path / "a")[0] == encode(b"another").tolist() and not (tmp_path / "a.parts").exists()


@pytest.mark.parametrize("interrupted", [False, True])
def test_other_documents_are_not_replaced(
    interrupted: bool, write_files: WriteFiles, make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs may be using them. The same documents may be packed again, because they may have grown."""
    root, prefix = write_files(MANY), tmp_path / "a"
    data = make_data(root)
    pack(data, prefix, workers=1)
    before = contents(prefix)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "b.txt").write_bytes(b"b")
    if interrupted:
        (tmp_path / "a.parts").mkdir()
    for other, value in (
        (make_data(tmp_path / "b"), f"data.path={root}"),
        (make_data(root, pattern="1*"), "data.pattern=**/*"),
        (make_data(root, bos=False), "tokenizer"),
    ):
        with refused(ConfigError, "--out") as problems:
            pack(other, prefix, workers=1)
        assert problems[0].message.endswith(value) and f"{prefix}.idx" in str(problems[0].hint)
    assert contents(prefix) == before
    (root / "zzz.txt").write_bytes(b"grown")
    monkeypatch.chdir(tmp_path)
    assert pack(make_data(root.name), prefix, workers=1).documents == 129
    Path(f"{prefix}.idx").unlink()
    assert pack(make_data(tmp_path / "b"), prefix, workers=1).documents == 1


def test_the_token_file_of_another_tool_is_not_replaced(
    write_files: WriteFiles, make_data: MakeData, tmp_path: Path
) -> None:
    """Nor is one that does not say what its documents are."""
    data, prefix = make_data(write_files(MANY)), tmp_path / "a"
    pack(data, prefix, workers=1)
    facts = json.loads(facts_path(prefix).read_text())
    facts_path(prefix).write_text(json.dumps({key: facts[key] for key in facts if key != "source"}))
    with pytest.raises(ConfigError, match="a may have other documents"):
        pack(data, prefix, workers=1)
    facts_path(prefix).unlink()
    with pytest.raises(ConfigError, match="a is a token file of another tool"):
        pack(data, prefix, workers=1)


def test_one_process_packs_a_file(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    (tmp_path / "a.parts").mkdir()
    with (
        files.locked(tmp_path / "a.parts" / files.LOCK),
        pytest.raises(StorageError, match="another process is packing these documents"),
    ):
        pack(make_data(write_files(MANY)), tmp_path / "a")


def test_a_folder_that_cannot_be_written_is_named(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (block, *_) = FORMATS["folder"].blocks(make_data(write_files(MANY)))
    for write in (
        lambda: pack(make_data(tmp_path / "documents"), tmp_path / "file" / "a"),
        lambda: pack_block(TOKENS, tmp_path / "file", block),
    ):
        with pytest.raises(StorageError, match="is a file, not a folder") as caught:
            write()
        assert str(tmp_path / "file") == str(caught.value.problems[0].key)


@pytest.mark.parametrize("texts", [{"a": b"", "b": b""}, {"a.jsonl": b""}])
def test_nothing_to_pack_is_refused(texts: Mapping[str, bytes], write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files(texts)
    lines = "a.jsonl" in texts
    data = make_data(root / "a.jsonl", format="jsonl") if lines else make_data(root)
    with refused(DataError, data.path) as problems:
        pack(data, root.parent / "packed")
    assert ("(2)" in problems[0].message) != lines
    assert [path.name for path in root.parent.iterdir()] == ["documents"], "nothing is left"


def test_documents_without_text_do_not_replace_others(
    write_files: WriteFiles, make_data: MakeData, tmp_path: Path
) -> None:
    root = write_files({"a.txt": b"text"})
    pack(make_data(root), tmp_path / "a")
    before = contents(tmp_path / "a")
    write_files({"a.txt": b""})
    with refused(DataError, f"{tmp_path}/documents"):
        pack(make_data(root), tmp_path / "a")
    assert contents(tmp_path / "a") == before and not (tmp_path / "a.parts").exists()


# Masks


def test_masks_are_packed(tmp_path: Path, make_data: MakeData) -> None:
    """A document whose mask leaves no label is left out, as an empty one."""
    rows = [([1, 2, 3, 4], [0, 0, 1, 1]), ([5, 6], [1, 0]), ([7, 8, 9], None)]
    records = [{"ids": ids} | ({"loss_mask": mask} if mask else {}) for ids, mask in rows]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    pack(make_data(tmp_path / "a.jsonl", format="jsonl", field="ids"), tmp_path / "a")
    packed = TokenFile.open(tmp_path / "a")
    assert documents(tmp_path / "a") == [[1, 2, 3, 4], [7, 8, 9]]
    found = [packed.counted(number, 0, 9) for number in range(2)]
    assert [mask.tolist() for mask in found if mask is not None] == [[False, False, True, True], [True] * 3]


Row = tuple[list[int], list[int] | None]


def masked(path: Path, *rows: Row) -> Path:
    """Write documents of token ids and masks as JSON lines."""
    records = [{"ids": ids} | ({} if mask is None else {"loss_mask": mask}) for ids, mask in rows]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def hashes_of(tmp_path: Path, make_data: MakeData, *rows: Row) -> tuple[list[int], str]:
    """The hashes of the documents, and that of all of them; also if they are packed one block at a time."""
    data = make_data(masked(tmp_path / "a.jsonl", *rows), format="jsonl", field="ids")
    contents = pack(data, tmp_path / "a", workers=1).contents
    (block,) = FORMATS["jsonl"].blocks(data)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    pack_block(TOKENS, tmp_path / "cache", block)
    (part,) = (tmp_path / "cache").rglob("*.hash")
    assert part.read_bytes() == hashes_path(tmp_path / "a").read_bytes()
    return np.fromfile(part, dtype="<u8").tolist(), contents


def test_hashes_cover_masks(tmp_path: Path, make_data: MakeData) -> None:
    """Otherwise a run would go on with other labels, which nobody would see."""
    ids = [*range(1, 18)]
    masks = [None, [1] * 17, [0, *[1] * 16], [*[1] * 16, 0], [1, 0, *[1] * 15]]
    found = [hashes_of(tmp_path, make_data, (ids, mask), ([5, 6], None)) for mask in masks]
    assert found[0][0] == found[1][0], "a mask that excludes nothing is no mask"
    assert len({hashes[0] for hashes, _ in found}) == 4
    assert len({contents for _, contents in found[2:]}) == 3, "the files have the same size"
    assert len({hashes[1] for hashes, _ in found}) == 1, "of a document without a mask in a file with one"


@pytest.mark.parametrize("is_masked", [True, False])
def test_a_lost_mask_is_refused(tmp_path: Path, make_data: MakeData, is_masked: bool) -> None:
    """Prompts would be trained on. A mask that belongs to another file is refused, too."""
    rows: list[Row] = [([1, 2, 3], [0, 0, 1] if is_masked else None), ([4, 5], None)]
    data = make_data(masked(tmp_path / "a.jsonl", *rows), format="jsonl", field="ids", cache=str(tmp_path / "cache"))
    (block,) = FORMATS["jsonl"].blocks(data)
    assert pack(data, tmp_path / "a", workers=1).masked == is_masked
    for folder in (tmp_path / "cache", tmp_path / "b.parts"):
        pack_block(TOKENS, folder, block)
    parts = [part_path(TOKENS, folder, block) for folder in (tmp_path / "cache", tmp_path / "b.parts")]
    for prefix in (tmp_path / "a", *parts):
        assert mask_path(prefix).exists() == is_masked
        mask_path(prefix).unlink() if is_masked else mask_path(prefix).write_bytes(b"\x1f")
    opens: list[tuple[Path, Callable[[], object]]] = [
        (tmp_path / "a", lambda: TokenCorpus("data", tmp_path / "a", 0.0)),
        (parts[0], lambda: text_corpus(data, [block]).lengths(0)),
        (parts[1], lambda: pack(data, tmp_path / "b", workers=1)),
    ]
    for prefix, open_ in opens:
        with pytest.raises(DataError, match="all tokens would count" if is_masked else "belongs to another") as caught:
            open_()
        assert caught.value.problems[0].key == f"{prefix}.mask"


def test_ids_that_the_tokenizer_does_not_have_are_refused(tmp_path: Path, make_data: MakeData) -> None:
    (tmp_path / "a.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [1, 300, 2]}\n')
    with refused(DataError, f"{tmp_path}/a.jsonl:2") as problems:
        pack(make_data(tmp_path / "a.jsonl", format="jsonl", field="ids"), tmp_path / "a", workers=1)
    assert "258" in problems[0].message and "300" in problems[0].message
    assert problems[0].key == f"{tmp_path}/a.jsonl:2"
