from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.config import schema
from engine.data import order
from engine.data.blocks.blocks import Lengths
from engine.data.blocks.packed import Packed
from engine.data.corpus import Corpus, Reader, TextCorpus, TokenCorpus
from engine.data.pack import pack
from engine.data.parts import LeftOut
from engine.data.sequences import SequenceTable
from engine.data.sources import folder, jsonl
from engine.data.sources.arrow import ArrowBlock
from engine.data.sources.formats import FORMATS
from engine.data.sources.parquet import ParquetBlock
from engine.data.sources.source import Block
from engine.data.steps import Cursor
from engine.data.token_facts import blocks_path, hashes_path
from engine.data.tokenizers.bytes import BOS, EOS
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError
from tests.data.memory import Exhausted, config_of, rows, steps_of
from tests.data.noted import Noted
from tests.data.reading import range_of, text_corpus, tokens
from tests.data.resuming import StepsFrom, columns, resumes_exactly
from tests.data.sources.rows import FORMS
from tests.data.token_files import megatron, written
from tests.refusals import refused

encode = open_tokenizer("bytes").document

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]
MANY = {f"{number:03d}.txt": b"document %d" % number for number in range(200)}


def texts(data: schema.Data) -> TextCorpus:
    return text_corpus(data, FORMATS[data.format].blocks(data), data.validation_share)


def blocks(corpus: Corpus) -> list[Lengths]:
    return [corpus.lengths(block) for block in range(corpus.blocks)]


def side(corpus: Corpus) -> NDArray[np.bool_]:
    """Which documents are for validation."""
    return np.concatenate([packed.hash() / 2.0**64 < corpus.share for packed in blocks(corpus)])


def inputs(corpus: Corpus) -> list[int]:
    return [int(length) for packed in blocks(corpus) for length in packed.inputs()]


def test_lengths_are_inputs_and_empty_documents_are_left_out(write_files: WriteFiles, make_data: MakeData) -> None:
    found = texts(make_data(write_files({"a.txt": b"abc", "b.txt": b"", "c.txt": b"x", "d.txt": b""})))
    assert inputs(found) == [4, 2] and found.lengths(0).left_out == LeftOut([1, 3], [])


def test_blank_lines_count_as_empty(tmp_path: Path, make_data: MakeData) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": ""}\n')
    assert texts(make_data(path, format="jsonl")).lengths(0).left_out == LeftOut([1, 2], [])


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
    found, ids = texts(make_data(write_files({"a": b"", "b": b"hello"}))), encode(b"hello")
    assert (ids[0], ids[-1]) == (BOS, EOS)
    spans = [(start, stop) for start in range(len(ids)) for stop in range(start + 1, len(ids) + 1)]
    read = Reader([found], 258).read([range_of(found, 0, 0, *span) for span in spans])
    for (start, stop), one in zip(spans, read, strict=True):
        assert one.tokens.tolist() == ids[start:stop].tolist() and one.counted is None


def test_a_reader_reads_from_the_source_that_a_sequence_names(make_data: MakeData, tmp_path: Path) -> None:
    other = TokenCorpus("other", written(tmp_path / "a", [[1, 2], [3, 4, 5]], masks=[None, [True, False, True]]), 0.0)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a").write_bytes(b"a")
    of_texts = texts(make_data(tmp_path / "texts"))
    wanted = [range_of(other, 0, 1, 1), range_of(of_texts, 0, 0), range_of(other, 0, 0, 0, 1)]
    first, second, third = Reader([of_texts, other], 258).read(wanted)
    assert (first.tokens.tolist(), second.tokens.tolist(), third.tokens.tolist()) == ([4, 5], [BOS, 97, EOS], [1])
    assert first.counted is not None and first.counted.tolist() == [False, True] and second.counted is None


def test_a_token_beyond_the_vocabulary_is_refused(write_files: WriteFiles, make_data: MakeData) -> None:
    found = texts(make_data(write_files({"a": b"hello"})))
    reader = Reader([found], 257)
    with pytest.raises(DataError, match="document 0 has token 257, but the model's vocabulary has 257") as caught:
        reader.read([range_of(found, 0, 0, 0, 7)])
    (problem,) = caught.value.problems
    assert str(problem.key).endswith(".bin") and str(problem.hint).startswith("set model.vocab to 258")
    assert len(reader.read([range_of(found, 0, 0, 0, 6)])[0].tokens) == 6


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
    prints = [text_corpus(data, one).fingerprint for one in (blocks, earlier)]
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
        return text_corpus(make_data(tmp_path), found).fingerprint

    kept = blocks_in(tmp_path / "texts")[form]
    prints = [fingerprint(kept)]
    for at, block in enumerate(kept):
        others = list(changes_of(block))
        assert len(others) >= len(vars(block)) >= 3
        prints += (fingerprint([*kept[:at], other, *kept[at + 1 :]]) for other in others)
    prints += map(fingerprint, ([*kept[1:], kept[0]], kept[:2], kept[1:], [*kept, kept[2]]))
    assert len(set(prints)) == len(prints)
    assert fingerprint(blocks_in(tmp_path / "other" / "place")[form]) == prints[0]


def test_the_fingerprint_covers_the_size_of_blocks_that_do_not_store_it(make_data: MakeData, tmp_path: Path) -> None:
    noted = [Noted.write(tmp_path / f"{number}", [b"text", b"more"]) for number in range(3)]
    before = text_corpus(make_data(tmp_path), noted).fingerprint
    assert text_corpus(make_data(tmp_path), noted).fingerprint == before
    noted[1].path.write_bytes(b"one more byte")
    assert text_corpus(make_data(tmp_path), noted).fingerprint != before


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
    assert tokens(found, 1, 2) == [6, 255]
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
    with refused(DataError, f"{tmp_path}/a.hash") as problems:
        TokenCorpus("data", tmp_path / "a", 0.0)
    assert "200" in problems[0].message


def test_blocks_of_another_file_are_refused(write_files: WriteFiles, make_data: MakeData, tmp_path: Path) -> None:
    pack(make_data(write_files(MANY)), tmp_path / "a")
    path = blocks_path(tmp_path / "a")
    table = path.read_bytes()
    for damaged in (b"", table[:-16], table + bytes(16)):
        path.write_bytes(damaged)
        with refused(DataError, f"{tmp_path}/a.blocks"):
            TokenCorpus("data", tmp_path / "a", 0.0)


# Texts against their token file


class ContentFrom(StepsFrom):
    """Steps of one source, with the tokens of each sequence and the label of its last input."""

    def content(self, table: SequenceTable) -> list[list[int]]:
        (corpus,) = self.steps.corpora
        ranges = [range_of(corpus, b, d, at, at + n + 1) for _, b, d, at, n in rows(table)]
        return [one.tokens.tolist() for one in Reader([corpus], 258).read(ranges)]

    def take(self) -> Any | None:
        found, step = self.steps.next(self.cursor), super().take()
        return found and (step, self.content(found[0]))

    def validation(self) -> Any:
        sets = self.steps.validation(self.cursor.order)
        return {name: (columns(table), self.content(table)) for name, table in sets.items()}


def both(data: schema.Data, prefix: Path) -> list[Corpus]:
    """The same documents, packed one block at a time and in one file."""
    shutil.rmtree(prefix.parent, ignore_errors=True)
    prefix.parent.mkdir()
    pack(data, prefix, workers=1)
    return [texts(data), TokenCorpus("data", prefix, data.validation_share)]


@pytest.mark.parametrize("form", ["folder", "jsonl"])
@settings(max_examples=12)  # each example packs its documents twice
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(lambda lengths: sum(lengths) > 200),
    batch=st.integers(20, 200),
    share=st.sampled_from([0.0, 0.3]),
    long=st.sampled_from(["step", "split"]),
    exhausted=st.sampled_from(["repeat", "stop"]),
)
def test_a_run_goes_on_with_the_token_file_of_its_texts(
    tmp_path_factory: pytest.TempPathFactory,
    make_data: MakeData,
    form: str,
    lengths: list[int],
    batch: int,
    share: float,
    long: str,
    exhausted: Exhausted,
) -> None:
    """From any cursor, with the same validation set, loss tokens, hashes, tokens and end."""
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
        if not any(map(len, map(trained, corpora))):
            return

        def begin(state: Any | None) -> ContentFrom:
            return ContentFrom(steps_of([corpora[state is not None]], config, exhausted=exhausted), state)

        assert begin(None).validation() == begin(Cursor().to_json()).validation()
        resumes_exactly(begin, most=6, ahead=1)


def trained(corpus: Corpus) -> list[int]:
    return [length for length, held in zip(inputs(corpus), side(corpus).tolist(), strict=True) if not held]


def test_a_run_may_change_between_texts_and_their_token_file(
    write_files: WriteFiles, make_data: MakeData, tmp_path: Path
) -> None:
    """As often as it likes; in an epoch every document is there once."""
    data = make_data(write_files(MANY), validation_share=0.2)
    turns = cycle(both(data, tmp_path / "packed" / "a"))
    items = resumes_exactly(lambda state: ContentFrom(steps_of([next(turns)], config_of(150, 50)), state), most=24)
    seen = Counter(tuple(tokens) for _, content in items for tokens in content)
    assert {*seen.values()} == {1, 2} and len(seen) > 100
