"""Transforms in the data plane: what is packed, counted as left out, named in the cache, and found again in files."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from engine.config import schema
from engine.config.load import load
from engine.data.blocks.blocks import BlockId, Range
from engine.data.corpus import TextCorpus
from engine.data.opening import list_blocks, open_sources
from engine.data.overview import Corpora
from engine.data.pack import pack
from engine.data.parts import LeftOut, part_path
from engine.data.places import Known, Match, at_place, places_of
from engine.data.scan import scan
from engine.data.sources import jsonl
from engine.data.steps import Cursor
from engine.data.transforms.transforms import TRANSFORMS
from engine.data.walk import Place
from engine.errors import DataError
from tests.data.resuming import StepsFrom, resumes_exactly
from tests.refusals import refused
from tests.root import ROOT

MakeData = Callable[..., schema.Data]
TEXTS = ["aa\n\nbbbb\n\ncc", "", "a", "long text without a paragraph", "dddd\n\ne\n\nffff"]
STEPS = ({"split": {"tokens": 6}}, {"drop": {"shorter": 4}})
PIECES = [["aa\n\n", "bbbb\n\n"], [], [], [TEXTS[3]], ["dddd\n\n", "e\n\n", "ffff"]]


@pytest.fixture
def data(tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch) -> Callable[..., schema.Data]:
    """A source of TEXTS in lines, in blocks of a few lines."""
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 60)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def make(*steps: Any, **changes: Any) -> schema.Data:
        more = {"format": "jsonl", "cache": str(tmp_path / "cache"), "transform": steps} | changes
        return make_data(tmp_path / "a.jsonl", **more)

    return make


def opened(data: schema.Data) -> TextCorpus:
    ((corpus,), _) = open_sources(data, list_blocks(data))
    assert isinstance(corpus, TextCorpus)
    return corpus


def texts_of(corpus: TextCorpus) -> list[list[str]]:
    """The text of each document of each block."""
    found = list[list[str]]()
    for block in range(corpus.blocks):
        lengths, texts = corpus.lengths(block), list[str]()
        for document, (inputs, content) in enumerate(
            zip(lengths.inputs().tolist(), lengths.hash().tolist(), strict=True)
        ):
            ((ids, _),) = corpus.slices([Range("data", block, document, 0, inputs + 1, content)])
            texts.append(bytes(token for token in ids.tolist() if token < 256).decode())
        found.append(texts)
    return found


def test_every_transform_has_a_file_and_a_test_of_its_name() -> None:
    for name in TRANSFORMS:
        assert (ROOT / "engine/data/transforms" / f"{name}.py").is_file()
        assert (ROOT / "tests/data/transforms" / f"test_{name}.py").is_file()


def test_documents_are_split_and_dropped_and_each_is_packed_or_counted(data: Callable[..., schema.Data]) -> None:
    corpus = opened(data(*STEPS))
    assert corpus.blocks > 1
    assert [*chain(*texts_of(corpus))] == [*chain(*PIECES)]
    facts = [corpus.lengths(block).left_out for block in range(corpus.blocks)]
    assert sum(one.dropped for one in facts if one) == 2 and sum(len(one.empty) for one in facts if one) == 1
    found = scan(data(*STEPS), None, 0)
    inputs = [int(one) for block in range(corpus.blocks) for one in corpus.lengths(block).inputs()]
    assert (sorted(found.lengths.tolist()), found.empty, found.dropped) == (sorted(inputs), 1, 2)


def test_steps_count_what_transforms_left_out_of_the_blocks_that_they_open(data: Callable[..., schema.Data]) -> None:
    """Also where a source has too many documents to count them at the start."""
    config = load(["recipe=quickstart", "batch_tokens=16", "context=16"])
    config = config.model_copy(update={"data": data(*STEPS).model_copy(update={"validation_share": 0.0})})
    steps, cursor, found = Corpora(config).steps, Cursor(), dict[BlockId, int]()
    while cursor.places.get("data", Place()).epoch == 0:
        step = steps.next(cursor)
        assert step is not None
        cursor = step[1]
        found |= steps.dropped
    left_out = [corpus.lengths(block).left_out for corpus in steps.corpora for block in range(corpus.blocks)]
    assert found == {BlockId("data", block): one.dropped for block, one in enumerate(left_out) if one and one.dropped}
    assert sum(found.values()) == 2


def test_pieces_and_left_out_documents_are_found_at_the_places_of_their_documents(
    data: Callable[..., schema.Data],
) -> None:
    corpus = opened(data(*STEPS))
    known = [
        Known("data", block, document, content)
        for block in range(corpus.blocks)
        for document, content in enumerate(corpus.lengths(block).hash().tolist())
    ]
    places = places_of([corpus], known)
    assert [places[one].problem for one in known] == [None] * len(known)
    numbers = [int(str(places[one].place).rpartition(":")[2]) for one in known]
    assert numbers == [number for number, pieces in enumerate(PIECES, start=1) for _ in pieces]
    for number, pieces in enumerate(PIECES, start=1):
        found, reason = at_place([corpus], f"{corpus.place}:{number}")
        mine = [one for one, line in zip(known, numbers, strict=True) if line == number]
        assert found == [Match(*one[:3]) for one in mine] and (reason is None) == bool(pieces)


def test_the_steps_are_in_the_names_of_blocks_and_in_the_fingerprint(data: Callable[..., schema.Data]) -> None:
    variants = [(), STEPS, STEPS[:1], STEPS[1:], STEPS[::-1], ({"split": {"tokens": 7}}, STEPS[1])]
    corpora = [opened(data(*steps)) for steps in variants]
    parts = {str(part_path(one.texts.tokens, one.texts.folder, one.texts.blocks[0])) for one in corpora}
    assert len(parts) == len({one.fingerprint for one in corpora}) == len(variants)


def test_blocks_without_a_transform_have_the_names_of_versions_that_had_none(data: Callable[..., schema.Data]) -> None:
    (block, *_) = list_blocks(data())["data"]
    assert block.signature == repr(block) and "transform" not in {*block.reading} and "transform" not in repr(block)
    assert LeftOut.of_json({"empty": [1], "broken": [], "masked": False}) == LeftOut([1], [])


def test_a_token_file_has_the_pieces_and_counts_what_was_left_out(
    data: Callable[..., schema.Data], tmp_path: Path
) -> None:
    facts = pack(data(*STEPS), tmp_path / "packed", workers=1)
    assert (facts.documents, facts.empty, facts.dropped) == (6, 1, 2) and "transform" in facts.source
    with refused(DataError, str(tmp_path / "a.jsonl")):
        pack(data({"drop": {"longer": 1}}), tmp_path / "none", workers=1)
    with refused(DataError, str(tmp_path / "a.jsonl")):
        scan(data({"drop": {"longer": 1}}), None, 0)


def test_a_document_to_which_a_step_cannot_be_applied_is_one_that_cannot_be_used(
    tmp_path: Path, make_data: MakeData
) -> None:
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"format": "jsonl", "field": "input_ids", "cache": str(tmp_path / "c"), "transform": STEPS}
    with refused(DataError, f"{tmp_path / 'ids.jsonl'}:1"):
        opened(make_data(tmp_path / "ids.jsonl", **options)).lengths(0)
    left_out = opened(make_data(tmp_path / "ids.jsonl", quarantine_after=3, **options)).lengths(0).left_out
    assert left_out is not None and [one.document for one in left_out.broken] == [0, 1]


def test_steps_of_transformed_documents_resume_exactly(data: Callable[..., schema.Data], tmp_path: Path) -> None:
    places = ["data=jsonl", f"data.path={tmp_path / 'a.jsonl'}", f"data.cache={tmp_path / 'cache'}"]
    sizes = ["batch_tokens=12", "context=8", "capacity=8", "data.validation_share=0"]
    config = load([*places, *sizes, "data.transform=[{split: {tokens: 6}}, {drop: {shorter: 4}}]"])
    assert config.data.transform == STEPS
    found = resumes_exactly(lambda state: StepsFrom(Corpora(config).steps, state), 9)
    assert len(found) == 9
