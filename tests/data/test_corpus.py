from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import models, pre_tokenizers

from engine.config import schema
from engine.config.load import load
from engine.config.schema import Segment, Source
from engine.data import corpus as module
from engine.data import order
from engine.data.blocks.loaders import trim
from engine.data.cache import ENDINGS
from engine.data.corpus import (
    Corpus,
    Packed,
    Reader,
    TextCorpus,
    TokenCorpus,
    _opened,
    corpora_of,
    list_blocks,
    open_corpora,
)
from engine.data.overview import Corpora
from engine.data.pack import pack
from engine.data.parts import LeftOut, _open_tokenizer, is_packed, pack_block, part_path
from engine.data.sources import folder, jsonl
from engine.data.sources.arrow import ArrowBlock
from engine.data.sources.formats import FORMATS
from engine.data.sources.parquet import ParquetBlock
from engine.data.sources.source import Block
from engine.data.steps import Cursor, SequenceTable, Steps
from engine.data.token_facts import blocks_path, hashes_path
from engine.data.tokenizers.bytes import BOS, EOS
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError, StorageError
from engine.launch.prepare import write_facts
from engine.run.folder import RunFolder
from tests.data.memory import Exhausted, config_of, rows, run, same, steps_of
from tests.data.noted import Noted, starts
from tests.data.sources.rows import FORMS
from tests.data.token_files import megatron, written
from tests.permissions import locked_out

encode = open_tokenizer("bytes").document

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]
MANY = {f"{number:03d}.txt": b"document %d" % number for number in range(200)}


def texts(data: schema.Data, name: str = "data", share: float | None = None) -> TextCorpus:
    share = data.validation_share if share is None else share
    return TextCorpus(name, data, share, FORMATS[data.format].blocks(data))


def blocks(corpus: Corpus) -> list[Packed]:
    return [corpus.open(block) for block in range(corpus.blocks)]


def side(corpus: Corpus) -> NDArray[np.bool_]:
    """Which documents are for validation."""
    return np.concatenate([packed.hash() / 2.0**64 < corpus.share for packed in blocks(corpus)])


def inputs(corpus: Corpus) -> list[int]:
    return [int(length) for packed in blocks(corpus) for length in packed.inputs()]


def test_lengths_are_inputs_and_empty_documents_are_left_out(write_files: WriteFiles, make_data: MakeData) -> None:
    found = texts(make_data(write_files({"a.txt": b"abc", "b.txt": b"", "c.txt": b"x", "d.txt": b""})))
    assert inputs(found) == [4, 2] and found.open(0).left_out == LeftOut([1, 3], [])


def test_blank_lines_count_as_empty(tmp_path: Path, make_data: MakeData) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": ""}\n')
    assert texts(make_data(path, format="jsonl")).open(0).left_out == LeftOut([1, 2], [])


def test_about_the_requested_fraction_is_used_for_validation(write_files: WriteFiles, make_data: MakeData) -> None:
    found = side(texts(make_data(write_files(MANY), validation_share=0.25)))
    assert len(found) == 200 and 30 <= found.sum() <= 70


def test_a_larger_validation_set_contains_a_smaller_one(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files(MANY)
    small, large = (side(texts(make_data(root, validation_share=share))) for share in (0.1, 0.4))
    assert small.sum() < large.sum()
    assert not (small & ~large).any()


def test_equal_documents_are_on_the_same_side_of_the_split(
    write_files: WriteFiles, make_data: MakeData, tmp_path: Path
) -> None:
    """Otherwise a model would be validated on training data. Also those of other sources and formats."""
    copies = {f"copy/{name}": text for name, text in MANY.items()}
    found = side(texts(make_data(write_files(MANY | copies), validation_share=0.5)))
    assert found[:200].tolist() == found[200:].tolist() and 50 < found[:200].sum() < 150
    lines = [json.dumps({"text": text.decode()}) + "\n" for text in MANY.values()]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    other = texts(make_data(tmp_path / "a.jsonl", format="jsonl", validation_share=0.5))
    assert side(other).tolist() == found[:200].tolist()


def test_every_span_equals_that_of_the_document(write_files: WriteFiles, make_data: MakeData) -> None:
    found, tokens = texts(make_data(write_files({"a": b"", "b": b"hello"}))), encode(b"hello")
    assert (tokens[0], tokens[-1]) == (BOS, EOS)
    reader = Reader([found], 258)
    for start in range(len(tokens)):
        for stop in range(start + 1, len(tokens) + 1):
            assert reader.tokens(0, 0, 0, start, stop).tolist() == tokens[start:stop].tolist()
            assert reader.counted(0, 0, 0, start, stop) is None


def test_a_reader_reads_from_the_source_that_a_sequence_names(make_data: MakeData, tmp_path: Path) -> None:
    other = TokenCorpus("other", written(tmp_path / "a", [[1, 2], [3, 4, 5]], masks=[None, [True, False, True]]), 0.0)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a").write_bytes(b"a")
    reader = Reader([texts(make_data(tmp_path / "texts")), other], 258)
    assert reader.tokens(0, 0, 0, 0, 9).tolist() == [BOS, 97, EOS]
    assert reader.tokens(1, 0, 1, 1, 9).tolist() == [4, 5]
    counted = reader.counted(1, 0, 1, 1, 3)
    assert counted is not None and counted.tolist() == [False, True]


def test_a_token_beyond_the_vocabulary_is_refused(write_files: WriteFiles, make_data: MakeData) -> None:
    reader = Reader([texts(make_data(write_files({"a": b"hello"})))], 257)
    with pytest.raises(DataError, match="document 0 has token 257, but the model's vocabulary has 257") as caught:
        reader.tokens(0, 0, 0, 0, 7)
    (problem,) = caught.value.problems
    assert str(problem.key).endswith(".bin") and str(problem.hint).startswith("set model.vocab to 258")
    assert len(reader.tokens(0, 0, 0, 0, 6)) == 6


# Texts, block by block


@pytest.fixture
def noted(tmp_path: Path) -> list[Noted]:
    """Three blocks that note when they are read."""
    return [Noted.write(tmp_path / f"{number}", [b"text %d" % number, b"more"]) for number in range(3)]


def corpus_of(noted: list[Noted], make_data: MakeData, tmp_path: Path) -> TextCorpus:
    return TextCorpus("data", make_data(tmp_path, cache=str(tmp_path / "cache")), 0.0, noted)


def test_a_block_is_read_when_it_is_opened_and_once_for_all(
    noted: list[Noted], make_data: MakeData, tmp_path: Path
) -> None:
    """Also once for other runs with the same cache folder."""
    for _ in range(2):
        found = corpus_of(noted, make_data, tmp_path)
        assert found.blocks == 3 and [found.size(block) for block in range(3)] == [12, 12, 12]
        for _ in range(2):
            assert found.open(1).read(0, 0, 99).tolist() == encode(b"text 1").tolist()
    assert [starts(block) for block in noted] == [0, 1, 0]


def test_what_others_pack_is_awaited(noted: list[Noted], make_data: MakeData, tmp_path: Path) -> None:
    """Only a block that is not there; what still is not there afterwards is packed here."""
    found, waited, opened = corpus_of(noted, make_data, tmp_path), list[Path](), list[tuple[int, LeftOut]]()
    found.wait = waited.append
    found.opened = lambda block, left_out: opened.append((block, left_out))
    parts = [part_path(found.tokens, found.folder, block) for block in noted]
    for block in (2, 0, 2):
        assert len(found.open(block).inputs()) == 2
    assert waited == [parts[2], parts[0]] and is_packed(parts[0]) and not is_packed(parts[1])
    assert opened == [(2, LeftOut([], [])), (0, LeftOut([], []))]
    again = corpus_of(noted, make_data, tmp_path)
    again.wait = lambda part: pytest.fail("it is there")
    again.open(0)


def test_the_use_of_a_block_is_noted(noted: list[Noted], make_data: MakeData, tmp_path: Path) -> None:
    """Loaders remove blocks that were not used for the longest time."""
    found = corpus_of(noted, make_data, tmp_path)
    found.open(0)
    part = part_path(found.tokens, found.folder, noted[0])
    paths = [*part.parent.iterdir()]
    for path in paths:
        os.utime(path, (1, 1))
    corpus_of(noted, make_data, tmp_path).open(0)
    assert len(paths) == 4 and all(path.stat().st_mtime > 10**9 for path in paths), "also for programs that tidy up"


def test_few_blocks_stay_open(
    noted: list[Noted], make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may open 1,024 files, however many sources there are."""
    monkeypatch.setattr(module, "_opened", lru_cache(1)(module._opened.__wrapped__))
    sources = [corpus_of(noted, make_data, tmp_path) for _ in range(3)]
    before = len([*Path("/proc/self/fd").iterdir()])
    for block in (0, 1, 2, 0):
        for found in sources:
            assert found.open(block).read(0, 0, 99).tolist() == encode(b"text %d" % block).tolist()
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 3


def test_a_block_that_was_removed_stays_readable_while_it_is_open(
    noted: list[Noted], make_data: MakeData, tmp_path: Path
) -> None:
    """Another run may keep the cache folder below its limit."""
    found = corpus_of(noted, make_data, tmp_path)
    opened = found.open(0)
    shutil.rmtree(found.folder)
    assert opened.read(0, 0, 99).tolist() == encode(b"text 0").tolist() and len(opened.hash()) == 2
    assert len(corpus_of(noted, make_data, tmp_path).open(0).inputs()) == 2


@pytest.mark.parametrize("ending", [".idx", ".bin", ".hash", ".json"])
def test_a_block_of_which_a_file_was_removed_is_packed_again(
    noted: list[Noted], make_data: MakeData, tmp_path: Path, ending: str
) -> None:
    """By a program that tidies up a disk, for example."""
    found = corpus_of(noted, make_data, tmp_path)
    found.pack_and_open(0)
    Path(f"{part_path(found.tokens, found.folder, noted[0])}{ending}").unlink()
    opened = found.pack_and_open(0)
    assert opened.read(0, 0, 99).tolist() == encode(b"text 0").tolist() and len(opened.hash()) == 2
    assert starts(noted[0]) == 2


def test_a_block_that_another_user_has_packed_and_kept_is_named(
    noted: list[Noted], make_data: MakeData, tmp_path: Path
) -> None:
    found = corpus_of(noted, make_data, tmp_path)
    found.pack_and_open(0)
    part = part_path(found.tokens, found.folder, noted[0])
    with locked_out(Path(f"{part}.bin")), pytest.raises(StorageError, match="cannot be read: Permission") as caught:
        found.pack_and_open(0)
    (problem,) = caught.value.problems
    assert problem.key == str(part) and "use another data.cache" in str(problem.hint)


@pytest.mark.parametrize("moment", range(6))
def test_a_block_may_be_removed_while_it_is_opened(
    make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    """Before the first of its files is opened, and after each. Without its mask, all tokens would count."""
    records = [{"ids": [1, 2, 3], "loss_mask": [0, 0, 1]}, {"ids": [4, 5]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = make_data(tmp_path / "a.jsonl", format="jsonl", field="ids", cache=str(tmp_path / "cache"))
    found, opens, opening = texts(data), list[str](), os.open
    found.pack_and_open(0)

    def trimming(path: str | Path, flags: int, *more: int, **where: int | None) -> int:
        ours = str(path).startswith(str(found.folder)) and Path(path).suffix in ENDINGS
        if ours and not opens and moment == 0:
            trim(found.folder, -1, set())
        opens.extend([Path(path).suffix] if ours else [])
        opened = opening(path, flags, *more, **where)
        if ours and len(opens) == moment:
            trim(found.folder, -1, set())
        return opened

    monkeypatch.setattr(os, "open", trimming)
    opened = found.pack_and_open(0)
    assert opens[:1] == [".idx"] and {*opens} == {".idx", ".bin", ".mask", ".hash", ".json"}
    counted = opened.counted(0, 0, 9)
    assert counted is not None and counted.tolist() == [False, False, True] and len(opened.hash()) == 2


def test_a_block_that_is_removed_again_and_again_is_an_error(
    noted: list[Noted], make_data: MakeData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not an endless loop."""
    found = corpus_of(noted, make_data, tmp_path)

    def pack_and_trim(*given: Any) -> None:
        pack_block(*given)
        trim(found.folder, -1, set())

    monkeypatch.setattr(module, "pack_block", pack_and_trim)
    with pytest.raises(StorageError, match="was removed 5 times by other runs") as caught:
        found.open(0)
    assert str(found.folder) in str(caught.value.problems[0].key) and starts(noted[0]) == 5


def test_a_document_that_cannot_be_used_is_an_error_of_the_caller_that_opens_its_block(
    write_files: WriteFiles, make_data: MakeData
) -> None:
    found = texts(make_data(write_files(MANY | {"199.txt": b"\xff"})))
    assert len(found.open(0).inputs()) == 64
    for _ in range(2):
        with pytest.raises(DataError, match="is not UTF-8") as caught:
            found.open(3)
    assert str(caught.value.problems[0].key).endswith("199.txt")


# Fingerprints


def test_the_fingerprint_of_texts_depends_on_names_and_sizes(write_files: WriteFiles, make_data: MakeData) -> None:
    """Nothing is read. Contents are compared by the ledger, where they are used again."""

    def fingerprint(files: Mapping[str, bytes]) -> str:
        root = write_files(files)
        found = texts(make_data(root)).fingerprint
        shutil.rmtree(root)
        return found

    first = fingerprint({"a": b"1", "b": b"2"})
    assert first == fingerprint({"a": b"1", "b": b"2"})
    others = [{"a": b"1", "b": b"23"}, {"a": b"1", "c": b"2"}, {"a": b"1"}, {"a": b"1", "b": b"2", "c": b""}]
    assert len({first, *map(fingerprint, others)}) == 5


def test_the_fingerprint_depends_on_the_tokenizer_and_on_what_is_read(
    write_files: WriteFiles, make_data: MakeData
) -> None:
    """The same texts are other tokens: a run must not go on with them."""
    root = write_files(MANY)
    changes = [{}, {"eos": False}, {"bos": False}, {"encoding": "bytes"}, {"pattern": "*1.txt"}]
    assert len({texts(make_data(root, **change)).fingerprint for change in changes}) == 5


def test_the_fingerprint_of_a_folder_is_that_of_earlier_versions(make_data: MakeData, tmp_path: Path) -> None:
    """Otherwise their runs could not be resumed."""
    for name, text in (("a.txt", "one"), ("b.txt", "three")):
        (tmp_path / name).write_text(text)
    assert texts(make_data(tmp_path)).fingerprint == "ccd0b6144b7714580b0cf999ce31e566"


SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
UNFLAGGED: dict[str, tuple[dict[str, Any], str]] = {  # fingerprints of the first versions
    "2c405c1349bf256f507d5459af70b85e": ({"text": "one"}, "text"),
    "fc5a255bcdd6ff5c90680d05b2292d4d": ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, "input_ids"),
    "f0c628bd1aa39ff34d446c96d2d18c5d": ({"messages": SAID, "tools": [{"x": 1}]}, "messages"),
    "33da869d2daeb3fc2edc152cfdb8b4af": ({"chosen": "ab", "rejected": "c"}, "chosen"),
}
LATELY: dict[str, tuple[dict[str, Any], str]] = {  # what they did not read, and rows that have it
    "labels": ({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, "input_ids"),
    "attention_mask": ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "attention_mask": [1, 1, 0]}, "input_ids"),
    "prompt": ({"prompt": "a", "chosen": "b"}, "chosen"),
    "messages.weight": ({"messages": [SAID[0], SAID[1] | {"weight": 0}]}, "messages"),
}


@pytest.mark.parametrize("known", UNFLAGGED)
def test_the_fingerprint_of_rows_is_that_of_earlier_versions(known: str, make_data: MakeData, tmp_path: Path) -> None:
    row, field = UNFLAGGED[known]
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert texts(make_data(tmp_path / "a.jsonl", format="jsonl", field=field)).fingerprint == known


@FORMS
@pytest.mark.parametrize("name", LATELY)
def test_fields_that_earlier_versions_did_not_read_change_the_fingerprint(
    name: str, form: str, write: Callable[..., None], make_data: MakeData, tmp_path: Path
) -> None:
    """Otherwise a run of theirs would be resumed with documents of other lengths. Other fields change nothing."""
    row, field = LATELY[name]
    write([row | {"unread": "x"}], tmp_path / "a")
    data = make_data(tmp_path / "a", format=form, field=field)
    blocks: list[Any] = FORMATS[form].blocks(data)
    assert {one.read_lately for one in blocks} == {name}
    earlier = [replace(one, read_lately="") for one in blocks]
    prints = [TextCorpus("data", data, 0.0, one).fingerprint for one in (blocks, earlier)]
    assert prints[0] != prints[1]


def blocks_in(root: Path) -> dict[str, list[Block]]:
    """Three blocks of each format. A fingerprint reads none of their files."""
    return {
        "folder": [
            folder.FolderBlock(str(root), f"{number}.txt\0{number}.md", "utf-8", False, None, 2) for number in range(3)
        ],
        "jsonl": [jsonl.JsonlBlock(f"{root}/{number}", "text", ((0, 9), (20, 29)), 30) for number in range(3)],
        "parquet": [ParquetBlock(f"{root}/a", number, 10 * number, 30, "text", "utf-8") for number in range(3)],
        "arrow": [ArrowBlock(f"{root}/{number}", 0, (8, 900), 30, "text", "utf-8") for number in range(3)],
    }


def changes_of(block: Block) -> Iterator[Block]:
    """Change each field of a block: the file or files that are read, and how."""
    others = {
        "root": lambda root: f"{root}/deep",
        "names": lambda names: names.replace(".md", ".other"),
        "path": lambda path: f"{path}.other",
        "ranges": lambda ranges: (ranges[0], (20, 28)),
        "offsets": lambda offsets: offsets[:1],
        "separator": lambda separator: "\n",
    }
    for name, value in vars(block).items():
        other = others.get(name, lambda value: value + (1 if isinstance(value, int) else "x"))
        yield replace(block, **{name: other(value)})  # type: ignore[type-var]
    if isinstance(block, folder.FolderBlock):
        yield replace(block, names="\0".join(block.names.split("\0")[::-1]))


@pytest.mark.parametrize("form", ["folder", "jsonl", "parquet", "arrow"])
def test_the_fingerprint_covers_each_field_of_each_block_and_their_order(
    form: str, make_data: MakeData, tmp_path: Path
) -> None:
    """Otherwise a resumed run would silently go on with other documents, or in another order."""

    def fingerprint(found: list[Block]) -> str:
        return TextCorpus("data", make_data(tmp_path), 0.0, found).fingerprint

    kept = blocks_in(tmp_path / "texts")[form]
    prints = [fingerprint(kept)]
    for at, block in enumerate(kept):
        others = list(changes_of(block))
        assert len(others) >= len(vars(block)) >= 3
        prints += (fingerprint([*kept[:at], other, *kept[at + 1 :]]) for other in others)
    prints += map(fingerprint, ([*kept[1:], kept[0]], kept[:2], kept[1:], [*kept, kept[2]]))
    assert len(set(prints)) == len(prints)
    assert fingerprint(blocks_in(tmp_path / "other" / "place")[form]) == prints[0]


def test_the_fingerprint_covers_the_size_of_blocks_that_do_not_store_it(
    noted: list[Noted], make_data: MakeData, tmp_path: Path
) -> None:
    before = corpus_of(noted, make_data, tmp_path).fingerprint
    assert corpus_of(noted, make_data, tmp_path).fingerprint == before
    noted[1].path.write_bytes(b"one more byte")
    assert corpus_of(noted, make_data, tmp_path).fingerprint != before


@pytest.mark.parametrize("form", ["folder", "jsonl", "several"])
def test_documents_may_be_moved_when_a_run_is_resumed(
    form: str, tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their fingerprint is the same in another folder, and for another way to write its path."""
    prints = set()
    for place in ("a", "somewhere/else/texts"):
        root = tmp_path / place
        (root / "deep").mkdir(parents=True)
        for name in ("one.jsonl", "a.jsonl", "deep/two.jsonl"):
            (root / name).write_text('{"text": "a texts one"}\n')
        monkeypatch.chdir(root.parent)
        for path in (root, Path(root.name), f"./{root.name}/"):
            if form == "folder":
                data = make_data(path)
            elif form == "jsonl":
                data = make_data(f"{path}/one.jsonl", format="jsonl")
            else:
                data = make_data((f"{path}/one.jsonl", f"{path}/deep/*.jsonl"), format="jsonl")
            prints.add(texts(data).fingerprint)
    assert len(prints) == 1


def test_no_blocks_have_a_fingerprint_too(tmp_path: Path, make_data: MakeData) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    assert texts(make_data(tmp_path / "a.jsonl", format="jsonl")).fingerprint


def test_the_fingerprint_of_packed_documents_is_of_their_contents(
    write_files: WriteFiles, make_data: MakeData, tmp_path: Path
) -> None:
    prints = []
    for number, files in enumerate(({"a": b"1", "b": b"2"}, {"b": b"2", "a": b"1"}, {"a": b"1", "b": b"3"})):
        pack(make_data(write_files(files)), tmp_path / f"{number}")
        prints.append(TokenCorpus("data", tmp_path / f"{number}", 0.0).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_the_fingerprint_of_a_file_of_another_tool_changes_with_it(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4, 5]]
    prints = [
        TokenCorpus("data", written(tmp_path / "a", found), 0.0).fingerprint
        for found in (documents, documents, [*documents, [6, 7]], [[1, 2], [3, 4, 5]], [[1, 2, 3], [4, 6]])
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 4


# Token files


def test_a_file_of_another_tool_is_a_corpus(tmp_path: Path) -> None:
    """Documents of less than two tokens have no input; the others are split by their place."""
    documents = [[[1, 2, 3], [4]], [[5]], [], *[[[6, number]] for number in range(600)]]
    prefix = megatron(tmp_path / "a", documents)
    found = TokenCorpus("data", prefix, 0.25)
    assert found.blocks == 3 and [len(packed.inputs()) for packed in blocks(found)] == [256, 256, 91]
    assert inputs(found)[:4] == [3, 0, 0, 1] and (found.vocabulary, found.ends) == (None, (None, None))
    assert [found.size(block) for block in range(3)] == [(5 + 253 * 2) * 2, 256 * 4, 91 * 4]
    assert found.open(1).read(2, 0, 9).tolist() == [6, 255]
    assert 100 <= side(found).sum() <= 200
    assert side(found).tolist() == side(TokenCorpus("data", prefix, 0.25)).tolist()


@given(st.lists(st.integers(1, 70), min_size=1, max_size=12))
def test_hashes_of_a_file_of_another_tool_are_those_of_the_numbers(counts: list[int]) -> None:
    """However its documents are divided into blocks."""
    bounds = np.cumsum([0, *counts]).tolist()
    parts = [Packed(None, None, first, last).hash() for first, last in pairwise(bounds)]  # type: ignore[arg-type]
    whole = Packed(None, None, 0, bounds[-1]).hash()  # type: ignore[arg-type]
    assert np.concatenate(parts).tolist() == whole.tolist() == np.random.Philox(key=0).random_raw(bounds[-1]).tolist()


def test_hashes_of_another_file_are_refused(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    pack(make_data(write_files(MANY)), tmp_path / "a")
    hashes_path(tmp_path / "a").write_bytes(bytes(8))
    with pytest.raises(DataError, match="has 1 hashes for 200 documents"):
        TokenCorpus("data", tmp_path / "a", 0.0)


def test_blocks_of_another_file_are_refused(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    pack(make_data(write_files(MANY)), tmp_path / "a")
    path = blocks_path(tmp_path / "a")
    table = path.read_bytes()
    for damaged in (b"", table[:-16], table + bytes(16)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="does not fit") as caught:
            TokenCorpus("data", tmp_path / "a", 0.0)
        assert caught.value.problems[0].key == str(path)


# Several sources


def test_sources_without_a_weight_are_for_validation(tmp_path: Path, make_data: MakeData) -> None:
    for name in ("web", "code", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_bytes(name.encode())
    pack(make_data(tmp_path / "code"), tmp_path / "packed")
    sources = {
        "web": Source(path=str(tmp_path / "web")),
        "code": Source(path=str(tmp_path / "packed"), format="tokens"),
        "test": Source(path=str(tmp_path / "test")),
    }
    mix = (Segment(weights={"web": 1.0}), Segment(step=5, weights={"code": 1.0, "test": 0.0}))
    data = make_data(tmp_path, sources=sources, mix=mix, validation_share=0.1)
    found = open_corpora(data, list_blocks(data))
    assert [(corpus.name, corpus.share, type(corpus)) for corpus in found] == [
        ("web", 0.1, TextCorpus),
        ("code", 0.1, TokenCorpus),
        ("test", 1.0, TextCorpus),
    ]
    assert [found[number].open(0).read(0, 0, 9).tolist() for number in range(3)] == [
        encode(name).tolist() for name in (b"web", b"code", b"test")
    ]


def test_the_only_source_is_trained_on(write_files: WriteFiles, make_data: MakeData) -> None:
    data = make_data(write_files(MANY), validation_share=0.2)
    (only,) = open_corpora(data, list_blocks(data))
    assert (only.name, only.share, only.blocks) == ("data", 0.2, 4)


# Texts against their token file


def content(corpus: Corpus, table: SequenceTable) -> list[tuple[int, tuple[int, ...]]]:
    """Source and tokens of each sequence, with the label of the last input."""
    reader = Reader([corpus], 258)
    return [(s, tuple(reader.tokens(s, b, d, at, at + n + 1).tolist())) for s, b, d, at, n in rows(table)]


def both(data: schema.Data, prefix: Path) -> list[Corpus]:
    """The same documents, packed one block at a time and in one file."""
    shutil.rmtree(prefix.parent, ignore_errors=True)
    prefix.parent.mkdir()
    pack(data, prefix, workers=1)
    return [texts(data), TokenCorpus("data", prefix, data.validation_share)]


@pytest.mark.parametrize("form", ["folder", "jsonl"])
@settings(max_examples=40)  # each example packs its documents twice
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(lambda lengths: sum(lengths) > 200),
    batch=st.integers(20, 200),
    share=st.sampled_from([0.0, 0.3]),
    long=st.sampled_from(["step", "split"]),
    exhausted=st.sampled_from(["repeat", "stop"]),
)
def test_texts_and_their_token_file_give_the_same_steps(
    tmp_path_factory: pytest.TempPathFactory,
    make_data: MakeData,
    form: str,
    lengths: list[int],
    batch: int,
    share: float,
    long: str,
    exhausted: Exhausted,
) -> None:
    """And the same validation set, loss tokens, hashes and cursors."""
    root = tmp_path_factory.getbasetemp() / f"both-{form}"
    shutil.rmtree(root, ignore_errors=True)
    (root / "texts").mkdir(parents=True)
    documents = [bytes(65 + (number + at) % 50 for at in range(length)) for number, length in enumerate(lengths)]
    if form == "folder":
        for number, text in enumerate(documents):
            (root / "texts" / f"{number:02}").write_bytes(text)
        data = make_data(root / "texts", validation_share=share, cache=str(root / "cache"))
    else:
        lines = [json.dumps({"text": text.decode()}) + "\n" for text in documents]
        (root / "texts" / "a.jsonl").write_text("".join(lines))
        data = make_data(root / "texts" / "a.jsonl", format="jsonl", validation_share=share, cache=str(root / "cache"))
    config = config_of(batch, 16, 3, long, 60)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "_BLOCK_FILES", 3)
        patch.setattr(jsonl, "_BLOCK_BYTES", 100)
        patch.setattr(order, "WINDOW_BYTES", 150)
        corpora = both(data, root / "packed" / "a")
        online, packed = (steps_of([corpus], config, exhausted=exhausted) for corpus in corpora)
        if not any(map(len, map(trained, corpora))):
            return
        tables = [list(steps.validation().values()) for steps in (online, packed)]
        assert [content(corpora[0], one) for one in tables[0]] == [content(corpora[1], one) for one in tables[1]]
        for (one, after), (other, same_after) in zip(run(online, 8), run(packed, 8), strict=True):
            assert same(one, other) and after == same_after
            assert content(corpora[0], one) == content(corpora[1], other)


def trained(corpus: Corpus) -> list[int]:
    return [length for length, held in zip(inputs(corpus), side(corpus).tolist(), strict=True) if not held]


def test_a_run_goes_on_with_the_token_file_of_its_texts(
    write_files: WriteFiles, make_data: MakeData, tmp_path: Path
) -> None:
    """From any cursor, and back; the documents of two epochs are each there twice."""
    data = make_data(write_files(MANY), validation_share=0.2)
    corpora = both(data, tmp_path / "packed" / "a")
    steps: list[Steps] = [steps_of([corpus], config_of(150, 50)) for corpus in corpora]
    cursor, seen = Cursor(), Counter[tuple[int, ...]]()
    for number in range(40):
        found = steps[number % 2].next(cursor)
        assert found is not None
        table, cursor = found
        if cursor.places["data"].epoch < 1:
            seen.update(tokens for _, tokens in content(corpora[number % 2], table))
    assert cursor.places["data"].epoch >= 1 and set(seen.values()) == {1} and len(seen) > 100


# The tokenizer of a run


def test_a_run_opens_its_tokenizer_to_pack_only(tmp_path: Path) -> None:
    """Its processes know the fingerprint. One that has become another makes no tokens."""
    model = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    model.save(str(path))
    for name in range(65):
        (tmp_path / "texts" / f"{name:02}").parent.mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{name:02}").write_bytes(b"a b a")
    places = [f"data.path={tmp_path / 'texts'}", f"data.cache={tmp_path / 'cache'}", f"data.tokenizer={path}"]
    config = load(["recipe=quickstart", "data=folder", *places])
    run_folder, corpora = RunFolder(tmp_path), Corpora(config)
    write_facts(run_folder, config, corpora, 0)
    shutil.rmtree(tmp_path / "cache")  # few documents are packed at the start
    _opened.cache_clear()
    corpora.sources[0].open(0)
    content = path.read_bytes()
    for now, message in ((None, "no such tokenizer"), (content + b" ", "is no longer the tokenizer that the run")):
        path.unlink(missing_ok=True)
        _open_tokenizer.cache_clear()
        if now is not None:
            path.write_bytes(now)
        (found,) = corpora_of(run_folder, config)
        assert found.open(0).read(0, 0, 9).tolist() == [0, 1, 0] and found.fingerprint == corpora.sources[0].fingerprint
        uses: list[Callable[[Corpus], object]] = [
            lambda one: one.open(1),
            lambda one: one.vocabulary,
            lambda one: one.ends,
        ]
        for use in uses:
            with pytest.raises(DataError, match=message) as caught:
                use(found)
            assert caught.value.problems[0].key == str(path)
    path.write_bytes(content)
    _open_tokenizer.cache_clear()
    assert found.open(1).read(0, 0, 9).tolist() == [0, 1, 0] and (found.vocabulary, found.ends) == (3, (None, None))
