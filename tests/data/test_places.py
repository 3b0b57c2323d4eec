"""Every document that a run has is found in its file, and every place in a file names its document."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from engine.config import schema
from engine.data.corpus import Corpus, TextCorpus, TokenCorpus
from engine.data.opening import open_sources
from engine.data.pack import pack
from engine.data.places import Known, Match, Place, at_place, places_of
from engine.data.sources import arrow, folder, jsonl
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Block
from engine.errors import DataError
from tests.data.token_files import megatron
from tests.refusals import refused

MakeData = Callable[..., schema.Data]
# Documents that are left out are among the others: empty ones, and, in files of bytes, one that is not UTF-8.
TEXTS = ["", "one", "two", "", *(f"number {number} " * (number % 5) for number in range(60)), ""]


def write(form: str, path: Path) -> tuple[Path, list[str]]:
    """Write TEXTS; return data.path, and the place of each document."""
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" if text else b"\n" for text in TEXTS)
    numbers = range(len(TEXTS))
    if form == "folder":
        (path / "texts").mkdir(parents=True)
        for number, text in enumerate(TEXTS):
            (path / "texts" / f"{number:03d}.txt").write_text(text)
        return path / "texts", [str(path / "texts" / f"{number:03d}.txt") for number in numbers]
    path.mkdir(parents=True)
    if form == "jsonl":
        (path / "a.jsonl").write_bytes(lines)
        return path / "a.jsonl", [f"{path / 'a.jsonl'}:{number + 1}" for number in numbers]
    if form == "gzip":
        (path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
        return path / "a.jsonl.gz", [f"{path / 'a.jsonl.gz'}:{number + 1}" for number in numbers]
    table = pa.table({"text": TEXTS})
    if form == "parquet":
        pa.parquet.write_table(table, path / "a.parquet", row_group_size=7)
        return path / "a.parquet", [f"{path / 'a.parquet'}:row {number}" for number in numbers]
    with pa.ipc.new_stream(path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=5)
    return path / "a.arrow", [f"{path / 'a.arrow'}:batch {number // 5}:row {number % 5}" for number in numbers]


FORMS = {"folder": "folder", "jsonl": "jsonl", "gzip": "jsonl", "parquet": "parquet", "arrow": "arrow"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(folder, "_BLOCK_FILES", 7)
    monkeypatch.setattr(arrow, "_BLOCK_BYTES", 1)


def corpus_of(data: schema.Data, blocks: Sequence[Block] = ()) -> TextCorpus:
    """Open a source with the blocks that a run has listed, or those that it has now."""
    ((corpus,), _) = open_sources(data, {"data": blocks or FORMATS[data.format].blocks(data)})
    assert isinstance(corpus, TextCorpus)
    return corpus


def known(corpora: Sequence[Corpus]) -> list[Known]:
    """All documents of some sources."""
    return [
        Known(corpus.name, block, document, content)
        for corpus in corpora
        for block in range(corpus.blocks)
        for document, content in enumerate(corpus.lengths(block).hash().tolist())
    ]


@pytest.mark.parametrize("form", FORMS)
def test_documents_of_texts_are_found(form: str, tmp_path: Path, make_data: MakeData) -> None:
    """With blocks of a few documents, also after their token files have been removed from the cache folder."""
    path, places = write(form, tmp_path / "in")
    data = make_data(path, format=FORMS[form], cache=str(tmp_path / "cache"))
    corpus = corpus_of(data)
    documents = known([corpus])
    assert corpus.blocks > 3 or form == "gzip"
    expected = [place for place, text in zip(places, TEXTS, strict=True) if text]
    for _ in range(2):
        found = places_of([corpus], documents)
        assert [found[one] for one in documents] == [(place, None) for place in expected]
        shutil.rmtree(tmp_path / "cache")
        corpus = corpus_of(data)
    for one, place in zip(documents, expected, strict=True):
        assert at_place([corpus], place) == ([one[:3]], None)


@pytest.mark.parametrize("form", FORMS)
def test_a_document_that_was_left_out_is_named_by_its_place(form: str, tmp_path: Path, make_data: MakeData) -> None:
    path, places = write(form, tmp_path / "in")
    corpus = corpus_of(make_data(path, format=FORMS[form], cache=str(tmp_path / "cache")))
    for place, text in zip(places, TEXTS, strict=True):
        if not text:
            assert at_place([corpus], place) == ([], "it has no token to predict")
    assert at_place([corpus], f"{places[-1]}99") == ([], None)
    assert at_place([corpus], str(tmp_path / "other.txt:3")) == ([], None)


def test_documents_of_a_divided_file_are_found_by_line_and_together(tmp_path: Path, make_data: MakeData) -> None:
    (tmp_path / "in").mkdir()
    first, second, third = (tmp_path / "in" / name for name in ("a.txt", "b.txt", "c.txt"))
    first.write_bytes(b"1\n2\n\n4")
    second.write_bytes(b"caf\xe9\n6")
    third.write_bytes(b"7\n8")
    data = make_data(first.parent, separator="\n", cache=str(tmp_path / "cache"), quarantine_after=3)
    corpus = corpus_of(data)
    documents = known([corpus])
    places = [f"{first}:1", f"{first}:2", f"{first}:4", f"{third}:1", f"{third}:2"]
    assert [place.place for place in places_of([corpus], documents).values()] == places
    for number, place in enumerate(places):
        assert at_place([corpus], place) == ([("data", 0, number)], None)
    assert at_place([corpus], str(third))[0] == [("data", 0, 3), ("data", 0, 4)]
    assert at_place([corpus], f"{first}:3") == ([], "it has no token to predict")
    assert at_place([corpus], str(second))[1] == "it cannot be used: is not UTF-8 at byte 3"


def test_documents_behind_one_that_cannot_be_used_are_found(tmp_path: Path, make_data: MakeData) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{\n\n[]\n{"text": "b"}\n{"text": "c"}\n')
    data = make_data(path, format="jsonl", cache=str(tmp_path / "cache"), quarantine_after=3)
    corpus = corpus_of(data)
    found = places_of([corpus], known([corpus]))
    assert [place.place for place in found.values()] == [f"{path}:{line}" for line in (1, 5, 6)]
    assert at_place([corpus], f"{path}:5") == ([("data", 0, 1)], None)
    assert at_place([corpus], f"{path}:4")[1] == "it cannot be used: is not a JSON object"
    assert at_place([corpus], f"{path}:byte 14")[1] == (
        "it cannot be used: is not JSON at column 2: Expecting property name enclosed in double quotes"
    )


def test_a_path_may_be_written_in_another_way(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write("jsonl", tmp_path / "in")
    corpus = corpus_of(make_data(path, format="jsonl", cache=str(tmp_path / "cache")))
    monkeypatch.chdir(tmp_path)
    assert at_place([corpus], "in/a.jsonl:2") == at_place([corpus], f"{path}:2") == ([("data", 0, 0)], None)


def test_a_file_of_several_documents_stands_for_all_of_them(tmp_path: Path, make_data: MakeData) -> None:
    path, _ = write("jsonl", tmp_path / "in")
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "b"}\n')
    corpus = corpus_of(make_data(path.parent, format="jsonl", cache=str(tmp_path / "cache")))
    matches, reason = at_place([corpus], str(path))
    assert matches == [Match("data", block, None) for block in range(corpus.blocks - 1)] and reason is None
    assert at_place([corpus], str(tmp_path / "in" / "b.jsonl"))[0] == [Match("data", corpus.blocks - 1, None)]


def test_changed_and_missing_files_are_said(tmp_path: Path, make_data: MakeData) -> None:
    path, places = write("folder", tmp_path / "in")
    data = make_data(path, cache=str(tmp_path / "cache"))
    blocks = corpus_of(data).texts.blocks
    documents = known([corpus_of(data, blocks)])

    def place(document: Known) -> Place:
        return places_of([corpus_of(data, blocks)], [document])[document]

    Path(places[1]).write_text("other")
    assert place(documents[0]) == (places[1], "its content has changed since the step")
    assert place(documents[1]) == (places[2], None)
    for number in range(1, 7):
        Path(places[number]).write_text("")
    assert place(documents[1]) == (None, "its files have changed: they have no such document")
    assert place(Known("data", 99, 0, 0)) == (None, "its files have changed: they have no such document")
    assert place(Known("gone", 0, 0, 0)) == (None, "the config of the run no longer has the source 'gone'")
    Path(places[2]).unlink()
    assert place(documents[0]) == (None, f"{places[2]}: cannot be read: No such file or directory")
    assert place(documents[-1]) == (places[-2], None), "of another block"


def test_documents_of_token_files_are_found(tmp_path: Path, make_data: MakeData) -> None:
    """Of ours, whose blocks are those of the texts, and of another tool's, with 256 documents each."""
    path, _ = write("jsonl", tmp_path / "in")
    pack(make_data(path, format="jsonl"), tmp_path / "ours", workers=1)
    megatron(tmp_path / "theirs", [[[1, number % 99]] for number in range(600)])
    for name, blocks, count in (("ours", 4, 50), ("theirs", 3, 600)):
        corpus = TokenCorpus("data", tmp_path / name, 0.0)
        documents = known([corpus])
        assert corpus.blocks >= blocks and len(documents) >= count
        found = places_of([corpus], documents)
        expected = [f"{tmp_path / name}:document {number}" for number in range(len(documents))]
        assert [found[one] for one in documents] == [(place, None) for place in expected]
        for one, place in zip(documents, expected, strict=True):
            assert at_place([corpus], place) == ([one[:3]], None)
        assert at_place([corpus], f"{tmp_path / name}:document {len(documents)}") == ([], None)


def test_a_document_for_validation_is_in_no_step(tmp_path: Path, make_data: MakeData) -> None:
    path, places = write("jsonl", tmp_path / "in")
    corpus = corpus_of(make_data(path, format="jsonl", cache=str(tmp_path / "cache"), validation_share=0.5))
    reasons = [at_place([corpus], place)[1] for place, text in zip(places, TEXTS, strict=True) if text]
    held = [one.hash / 2**64 < 0.5 for one in known([corpus])]
    assert reasons == ["it is held out for validation" if one else None for one in held] and len({*held}) == 2


def test_a_file_is_read_once_for_all_of_its_lines(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write("jsonl", tmp_path / "in")
    corpus = corpus_of(make_data(path, format="jsonl", cache=str(tmp_path / "cache")))
    passes, line_places = list[str](), jsonl.line_places
    monkeypatch.setattr(
        "engine.data.sources.jsonl.line_places", lambda path, places: passes.append(path) or line_places(path, places)
    )
    assert len(places_of([corpus], known([corpus]))) > 40 and passes == [str(path)]


def test_an_unreadable_file_is_an_error_when_its_place_is_asked_for(tmp_path: Path, make_data: MakeData) -> None:
    path, places = write("jsonl", tmp_path / "in")
    corpus = corpus_of(make_data(path, format="jsonl", cache=str(tmp_path / "cache")))
    path.unlink()
    with refused(DataError, f"{tmp_path}/in/a.jsonl"):
        at_place([corpus], places[1])
