"""Documents of two sources, and what every implementation of Blocks must do with them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from engine.config import schema
from engine.data.blocks.blocks import BlockId, Blocks, Range, Slice
from engine.data.blocks.texts import Texts
from engine.data.parts import Broken, LeftOut
from engine.data.sources import folder
from engine.data.sources.formats import FORMATS
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError
from tests.data.blocks.in_memory import Made, MadeBlock

encode = open_tokenizer("bytes").document
MakeData = Callable[..., schema.Data]
Documents = Mapping[BlockId, MadeBlock]


@dataclass(frozen=True)
class Given:
    """Blocks of an implementation, and the documents that they have."""

    blocks: Blocks
    made: Documents

    @property
    def known(self) -> list[tuple[BlockId, int, Made]]:
        """All documents that can be used, with their places."""
        usable = ((block, made.documents) for block, made in self.made.items() if made.error is None)
        return [(block, number, one) for block, found in usable for number, one in enumerate(found)]


@pytest.fixture
def given_texts(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> tuple[Mapping[str, Texts], Documents]:
    """Rows of ids with masks, of which some are left out, and files of text, of which one is broken: several blocks."""
    monkeypatch.setattr(folder, "_BLOCK_FILES", 2)
    drawn, made, sources = random.Random(0), dict[BlockId, MadeBlock](), dict[str, Texts]()
    (tmp_path / "rows").mkdir()
    for number, lengths in enumerate([(5, 9, 1, 40), (3, 2), (7,)]):
        documents = list[Made]()
        for length in lengths:  # those of file 1 have no masks
            ids, mask = drawn.choices(range(256), k=length), drawn.choices([True, number == 1], k=length)
            documents.append(Made(ids, mask))
        lines = [json.dumps({"ids": one.ids, "loss_mask": [*map(int, one.mask)]}) for one in documents]
        path = tmp_path / "rows" / f"{number}.jsonl"
        path.write_text("\n".join(["{", *lines, ""]))
        empty = [at + 1 for at, one in enumerate(documents) if not any(one.mask[1:])]
        kept = [one for one in documents if any(one.mask[1:])]
        reason = "is not JSON at column 2: Expecting property name enclosed in double quotes"
        left_out = LeftOut(empty, [Broken(0, f"{path}:byte 0", reason)], not all(all(one.mask) for one in kept))
        made[BlockId("rows", number)] = MadeBlock(kept, [str(path)], left_out)
    (tmp_path / "texts").mkdir()
    for number in range(5):
        path = tmp_path / "texts" / f"{number}.txt"
        path.write_bytes(b"\xff" if number == 4 else b"text " * number + b".")
        block = made.setdefault(BlockId("texts", number // 2), MadeBlock([], []))
        block.files.append(str(path))
        ids = encode(path.read_bytes()).tolist()
        block.documents.append(Made(ids, [True] * len(ids), path.read_bytes()))
    made[BlockId("texts", 2)] = MadeBlock([], [str(path)], error=DataError("is not UTF-8", key=str(path)))
    cache = {"cache": str(tmp_path / "cache")}
    rows = make_data(tmp_path / "rows", format="jsonl", field="ids", quarantine_after=3, **cache)
    for name, data in (("rows", rows), ("texts", make_data(tmp_path / "texts", **cache))):
        sources[name] = Texts.of(data, FORMATS[data.format].blocks(data))
    assert {BlockId(name, block) for name, one in sources.items() for block in range(len(one.blocks))} == made.keys()
    return sources, made


class TestBlocks:
    def test_lengths_are_those_of_the_documents(self, given_blocks: Given) -> None:
        for block, made in given_blocks.made.items():
            if made.error is None:
                found = given_blocks.blocks.lengths(block)
                assert len(found) == len(made.documents) and found.left_out == made.left_out
                assert found.inputs().tolist() == [len(one.ids) - 1 for one in made.documents]
                assert found.hash().tolist() == [one.hash for one in made.documents]
                assert found.hash(len(found) - 1, len(found)).tolist() == [made.documents[-1].hash]
                assert (found.inputs().dtype, found.hash().dtype) == (np.int64, np.uint64)

    def test_masked_runs_are_the_tokens_that_do_not_count(self, given_blocks: Given) -> None:
        seen = 0
        for block, made in given_blocks.made.items():
            if made.error is None:
                runs = given_blocks.blocks.lengths(block).runs()
                assert runs.dtype == np.int64 and runs.shape[1:] == (3,)
                expected = [
                    (document, at)
                    for document, one in enumerate(made.documents)
                    for at, counts in enumerate(one.mask)
                    if not counts
                ]
                assert [(document, at) for document, *run in runs.tolist() for at in range(*run)] == expected
                assert not {(document, stop) for document, _, stop in runs.tolist()} & {*expected}, "they are apart"
                seen += len(runs)
        assert seen > 10

    def test_slices_are_the_tokens_of_ranges(self, given_blocks: Given) -> None:
        """Of several sources in one call, in any order, also beyond the end of a document and empty ones."""
        drawn = random.Random(1)
        wanted, expected = list[Range](), list[tuple[list[int], list[bool]]]()
        for _ in range(100):
            block, document, made = drawn.choice(given_blocks.known)
            start, stop = sorted(drawn.choices(range(len(made.ids) + 3), k=2))
            wanted.append(Range(*block, document, start, stop, made.hash))
            expected.append((made.ids[start:stop], made.mask[start:stop]))
        found = given_blocks.blocks.slices(wanted)
        assert [*map(plain, found)] == expected and {one.tokens.dtype for one in found} == {np.dtype(np.int64)}
        assert given_blocks.blocks.slices([]) == []

    def test_a_document_that_is_another_one_now_is_refused(self, given_blocks: Given) -> None:
        """By its hash, its number, or the number of its block; the error names its files."""
        block, document, made = given_blocks.known[0]
        good = Range(*block, document, 0, 9, made.hash)
        files = given_blocks.made[block].files
        for bad in (good._replace(content=made.hash ^ 1), good._replace(document=99), good._replace(block=99)):
            with pytest.raises(DataError) as caught:
                given_blocks.blocks.slices([good, bad])
            assert caught.value.problems[0].key in files or bad.block == 99
        assert len(given_blocks.blocks.slices([good])) == 1

    def test_a_document_that_cannot_be_used_is_an_error_of_each_call(self, given_blocks: Given) -> None:
        """Also if the block was asked for: the error comes when it is needed."""
        (broken,) = (block for block, made in given_blocks.made.items() if made.error is not None)
        given_blocks.blocks.ask([broken])
        uses: list[Callable[[], object]] = [
            lambda: given_blocks.blocks.lengths(broken),
            lambda: given_blocks.blocks.slices([Range(*broken, 0, 0, 1, 0)]),
        ]
        for use in [*uses, *uses]:
            with pytest.raises(DataError) as caught:
                use()
            assert caught.value.problems[0].key == given_blocks.made[broken].files[0]

    def test_asking_changes_nothing(self, given_blocks: Given) -> None:
        """Whatever is asked for: nothing, a part, everything twice; also what is kept, and after the end."""
        blocks, known = given_blocks.blocks, given_blocks.known
        wanted = [Range(*block, document, 0, 99, made.hash) for block, document, made in known]
        expected = [(made.ids, made.mask) for *_, made in known]
        usable = [block for block, made in given_blocks.made.items() if made.error is None]
        for asked in ([], usable[::-1], usable * 2, usable[:1]):
            blocks.ask(iter(asked))
            assert [*map(plain, blocks.slices(wanted))] == expected
        blocks.keep(iter(usable[:2]))
        blocks.close()
        assert [*map(plain, blocks.slices(wanted))] == expected
        assert all(len(blocks.lengths(block)) == len(given_blocks.made[block].documents) for block in usable)

    def test_slices_may_be_read_in_several_threads(self, given_blocks: Given) -> None:
        wanted = [Range(*block, document, 0, 99, made.hash) for block, document, made in given_blocks.known]
        with ThreadPoolExecutor(4) as pool:
            found = [*pool.map(lambda _: [*map(plain, given_blocks.blocks.slices(wanted))], range(12))]
        assert found == [[(made.ids, made.mask) for *_, made in given_blocks.known]] * 12


def plain(found: Slice) -> tuple[list[int], list[bool]]:
    """The tokens of a slice, and which of them count."""
    counted = [True] * len(found.tokens) if found.counted is None else found.counted.tolist()
    return found.tokens.tolist(), counted
