from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import schema
from engine.data.blocks.blocks import Range, Slice
from engine.data.corpus import Corpus, Reader, TokenCorpus, chosen_lengths
from engine.data.inputs import IGNORE, idle_inputs, rank_inputs, wanted
from engine.data.opening import list_blocks, open_sources
from engine.data.pack import pack
from engine.data.sequences import SequenceTable, piece_bounds
from engine.data.sources.jsonl import JsonlBlock
from engine.data.tokenizers.bytes import BOS, EOS
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError
from engine.planner.plan.schedule import shard_tokens
from engine.planner.plan.step_plan import MicroBatch, Shard
from engine.units import Ints
from tests.data.reading import text_corpus

encode = open_tokenizer("bytes").document

TEXTS = [bytes(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)) for size in (1, 2, 3, 7, 40, 101)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, make_data: Callable[..., schema.Data]) -> Corpus:
    root = tmp_path_factory.mktemp("corpus")
    for number, text in enumerate(TEXTS):
        (root / f"{number}.bin").write_bytes(text)
    data = make_data(root, encoding="bytes")
    return open_sources(data, list_blocks(data)).corpora[0]


def cut_of(corpus: Corpus, documents: Ints, context: int) -> SequenceTable:
    """The pieces of documents of the only block."""
    owner, start, length = piece_bounds(corpus.lengths(0).inputs()[documents], context)
    zeros, hashes = np.zeros_like(start), corpus.lengths(0).hash()[documents]
    return SequenceTable(zeros, zeros, documents[owner], start, length, length, hashes[owner])


def shards_of(table: SequenceTable, degrees: list[int]) -> list[Shard]:
    return [
        Shard(sequence, int(table.length[sequence]), tuple(range(degree)), part)
        for sequence, degree in enumerate(degrees)
        for part in range(degree)
    ]


@given(st.data())
def test_any_plan_covers_each_sequence_once_and_agrees_with_the_document(corpus: Corpus, data: st.DataObject) -> None:
    """Random contexts, degrees (also so large that shards are empty) and micro-batches of random shards."""
    table = cut_of(corpus, np.arange(len(TEXTS)), context=data.draw(st.integers(1, 120)))
    degrees = data.draw(st.lists(st.integers(1, 7), min_size=len(table), max_size=len(table)))
    shards = data.draw(st.permutations(shards_of(table, degrees)))
    size = data.draw(st.integers(1, 5))
    seen = [np.zeros(length, dtype=np.int64) for length in table.length]
    for index_, first in enumerate(range(0, len(shards), size)):
        micro = MicroBatch(index_, rank=0, gang=index_, slot=-1, shards=tuple(shards[first : first + size]))
        inputs = rank_inputs(Reader([corpus], 258), table, micro)
        offset = 0
        for shard in micro.shards:
            here = slice(offset, offset + shard_tokens(shard.length, shard.degree, shard.part))
            offset = here.stop
            tokens = encode(TEXTS[int(table.document[shard.sequence])])[int(table.start[shard.sequence]) :]
            positions = inputs.positions[here]
            assert inputs.tokens[here].tolist() == tokens[positions].tolist()
            assert inputs.labels[here].tolist() == tokens[positions + 1].tolist()
            assert (np.diff(positions) > 0).all()
            seen[shard.sequence][positions] += 1
        assert offset == len(inputs.tokens) == len(inputs.labels) == len(inputs.positions)
    assert all((counts == 1).all() for counts in seen)


@given(st.data())
def test_slices_of_a_sequence_cover_it_once_and_agree_with_the_document(corpus: Corpus, data: st.DataObject) -> None:
    """Positions go on where the earlier slices end; slices may be shorter than their ring."""
    table = cut_of(corpus, np.arange(len(TEXTS)), context=60)
    sequence = data.draw(st.integers(0, len(table) - 1))
    length, degree = int(table.length[sequence]), data.draw(st.integers(1, 5))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=min(6, length - 1))))
    lengths = np.diff([0, *cuts, length]).tolist()
    tokens = encode(TEXTS[int(table.document[sequence])])[int(table.start[sequence]) :]
    seen = np.zeros(length, dtype=np.int64)
    for number, size in enumerate(lengths):
        earlier, later = tuple(lengths[:number]), sum(lengths[number + 1 :])
        for part in range(degree):
            shard = Shard(sequence, size, tuple(range(degree)), part, earlier, later)
            assert shard.whole == length
            micro = MicroBatch(0, rank=part, gang=0, slot=-1, shards=(shard,))
            inputs = rank_inputs(Reader([corpus], 258), table, micro)
            positions = inputs.positions
            assert len(positions) == shard_tokens(size, degree, part)
            assert all(sum(earlier) <= at < sum(earlier) + size for at in positions.tolist())
            assert inputs.tokens.tolist() == tokens[positions].tolist()
            assert inputs.labels.tolist() == tokens[positions + 1].tolist()
            seen[positions] += 1
    assert (seen == 1).all()


def test_low_chunk_then_high_chunk_in_the_order_of_the_shards(corpus: Corpus) -> None:
    table = cut_of(corpus, np.array([3, 0]), context=8)
    micro = MicroBatch(0, rank=0, gang=0, slot=-1, shards=(Shard(1, 2, (0,), 0), Shard(0, 8, (0, 1), 0)))
    inputs = rank_inputs(Reader([corpus], 258), table, micro)
    assert inputs.positions.tolist() == [0, 1, 0, 1, 6, 7]
    text = list(TEXTS[3])
    assert inputs.tokens.tolist() == [BOS, TEXTS[0][0], BOS, text[0], text[5], text[6]]
    assert inputs.labels.tolist() == [TEXTS[0][0], EOS, text[0], text[1], text[6], EOS]


def test_the_last_label_of_a_piece_is_the_first_token_of_the_next(corpus: Corpus) -> None:
    table = cut_of(corpus, np.array([4]), context=16)
    first, second = (
        rank_inputs(Reader([corpus], 258), table, MicroBatch(0, 0, 0, -1, (Shard(sequence, 16, (0,), 0),)))
        for sequence in (0, 1)
    )
    assert first.labels[-1] == second.tokens[0]
    assert second.positions[0] == 0


def test_a_micro_batch_of_empty_shards_has_no_tokens(corpus: Corpus) -> None:
    table = cut_of(corpus, np.array([0]), context=8)
    inputs = rank_inputs(Reader([corpus], 258), table, MicroBatch(0, 0, 0, -1, (Shard(0, 2, (0, 1, 2, 3), 3),)))
    assert len(inputs.tokens) == len(inputs.labels) == len(inputs.positions) == 0


def test_an_idle_micro_batch_has_one_input_and_no_loss_token(corpus: Corpus) -> None:
    idle = rank_inputs(Reader([corpus], 258), cut_of(corpus, np.array([0]), 8), MicroBatch(0, 0, 0, -1, ()))
    for inputs in (idle, idle_inputs()):
        assert (inputs.tokens.tolist(), inputs.labels.tolist(), inputs.positions.tolist()) == ([0], [IGNORE], [0])


def test_what_a_rank_wants_is_what_it_reads(corpus: Corpus) -> None:
    """Another process can fetch it before, without reading anything itself."""
    table, read = cut_of(corpus, np.arange(len(TEXTS)), context=16), list[Range]()

    class Recording(Reader):
        def read(self, wanted: Sequence[Range]) -> list[Slice]:
            read.extend(wanted)
            return super().read(wanted)

    shards = shards_of(table, [1 + number % 3 for number in range(len(table))])
    micro = MicroBatch(0, 0, 0, -1, tuple(shards[::2]))
    inputs = rank_inputs(Recording([corpus], 258), table, micro)
    found = wanted(["data"], table, micro)
    assert found == read and sum(one.stop - one.start - 1 for one in found) == len(inputs.tokens) > 0
    assert wanted(["data"], table, MicroBatch(0, 0, 0, -1, ())) == []


def test_labels_that_do_not_count_are_ignored(tmp_path: Path, make_data: Callable[..., schema.Data]) -> None:
    ids, mask = list(range(10, 22)), [0, 0, 1, 0, 1, 1, 0, 0, 0, 1, 1, 0]
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    data = make_data(tmp_path / "a.jsonl", format="jsonl", field="input_ids")
    ((masked,), _) = open_sources(data, list_blocks(data))
    table = cut_of(masked, np.array([0]), context=11)
    counted = [token if counts else IGNORE for token, counts in zip(ids[1:], mask[1:], strict=True)]
    for degree in (1, 2, 3):
        for part in range(degree):
            micro = MicroBatch(0, 0, 0, -1, (Shard(0, 11, tuple(range(degree)), part),))
            inputs = rank_inputs(Reader([masked], 258), table, micro)
            assert inputs.labels.tolist() == [counted[position] for position in inputs.positions.tolist()]
            assert inputs.tokens.tolist() == [ids[position] for position in inputs.positions.tolist()]


def lines(path: Path, *texts: str) -> None:
    """Write documents, at a time that differs from the last one's."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    os.utime(path, (1, next(TIMES)))


TIMES = count(1)
WRITTEN = ("one", "two", "three")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("now", [("one", "TWO", "three"), ("one",), ("two", "one", "three"), ("new", "one", "two"), ()])
def test_a_rank_reads_what_was_planned_or_nothing(
    tmp_path: Path, make_data: Callable[..., schema.Data], now: tuple[str, ...], packed: bool
) -> None:
    """A rank opens a block later than the planning process. A file that was changed meanwhile has other documents."""
    path = tmp_path / "a.jsonl"

    def opened() -> Corpus:
        data = make_data(path, format="jsonl", cache=str(tmp_path / "cache"))
        if packed:
            pack(data, tmp_path / "a", workers=1)
            return TokenCorpus("data", tmp_path / "a", 0.0)
        return text_corpus(data, [JsonlBlock(str(path), "text", ((0, 1 << 20),), 1 << 20)])

    micro = MicroBatch(0, 0, 0, -1, (Shard(0, 4, (0,), 0),))
    lines(path, *WRITTEN)
    table = cut_of(opened(), np.array([1]), context=16)
    lines(path, *(now or WRITTEN))
    reader = Reader([opened()], 258)
    if not now:  # written again, or copied
        assert rank_inputs(reader, table, micro).tokens.tolist() == [BOS, *b"two"]
        return
    with pytest.raises(DataError, match="has changed since document data:0:1 was chosen for a step") as caught:
        rank_inputs(reader, table, micro)
    assert caught.value.problems[0].key == (f"{tmp_path}/a.bin" if packed else str(path))


def test_a_block_that_is_gone_is_an_error_too(
    tmp_path: Path, make_data: Callable[..., schema.Data], write_files: Callable[..., Path]
) -> None:
    data = make_data(write_files({f"{number:03}": b"text" for number in range(100)}))
    ((corpus,), _) = open_sources(data, list_blocks(data))
    place = f"{data.path}/064 .. {data.path}/099"
    for block, document, where in ((1, 36, place), (1, 3, place), (2, 0, data.path)):
        wanted = Range("data", block, document, 0, 1, 7)
        uses: list[Callable[[], object]] = [
            lambda: chosen_lengths(corpus, block, np.array([document]), np.array([7], dtype=np.uint64)),  # noqa: B023
            lambda: corpus.slices([wanted]),  # noqa: B023
        ]
        for use in uses:
            with pytest.raises(DataError, match="has changed since") as caught:
                use()
            assert caught.value.problems[0].key == where
