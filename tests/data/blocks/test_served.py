"""Questions of other hosts. That the answers are right is the business of test_blocks.py and test_constructor.py."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import schema
from engine.data.arrays import to_bytes
from engine.data.blocks.blocks import BlockId, Range, Slice
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.served import (
    Served,
    joined,
    lengths_payload,
    ranges_payload,
    received_lengths,
    received_ranges,
    received_slices,
)
from engine.data.blocks.texts import Texts
from engine.data.sources import jsonl
from engine.data.sources.formats import FORMATS


@pytest.fixture
def blocks(tmp_path: Path, make_data: Callable[..., schema.Data], monkeypatch: pytest.MonkeyPatch) -> LocalBlocks:
    """Rows with masks, of which some are left out, in some blocks."""
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 500)
    drawn, lines = random.Random(0), list[str]()
    for number in range(60):
        ids = drawn.choices(range(256), k=drawn.randint(1, 30))
        mask = drawn.choices([0, 1], k=len(ids)) if number % 3 else [1] * len(ids)
        lines.append("{" if number % 9 == 0 else json.dumps({"ids": ids, "loss_mask": mask}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = make_data(
        tmp_path / "a.jsonl", format="jsonl", field="ids", quarantine_after=3, cache=str(tmp_path / "cache")
    )
    return LocalBlocks({"rows": Texts.of(data, FORMATS["jsonl"].blocks(data))})


def known(blocks: LocalBlocks) -> list[BlockId]:
    return [BlockId("rows", number) for number in range(len(blocks._texts["rows"].blocks))]


def test_lengths_travel(blocks: LocalBlocks) -> None:
    wanted = known(blocks)
    local = {block: blocks.lengths(block) for block in wanted}
    sent = received_lengths(Served(blocks).lengths(wanted))
    assert [*sent] == wanted and len(wanted) > 5
    runs = 0
    for block, found in sent.items():
        one = local[block]
        assert len(found) == len(one) and found.left_out == one.left_out
        assert found.inputs().tolist() == one.inputs().tolist() and found.inputs().dtype == np.int64
        assert found.hash().tolist() == one.hash().tolist() and found.hash(1, 2).tolist() == one.hash(1, 2).tolist()
        assert found.runs().tolist() == one.runs().tolist() and found.runs().dtype == np.int64
        runs += len(found.runs())
    assert runs > 100
    documents = sum(map(len, local.values()))
    assert len(lengths_payload({})) < 100 < len(lengths_payload(local)) < 12 * documents + 12 * runs + 130 * len(local)


def test_nothing_is_packed_for_an_answer(blocks: LocalBlocks) -> None:
    """A block that is not packed is missing; the tokens of others come."""
    first, second, *_ = known(blocks)
    content = blocks.lengths(first).hash()[0].item()
    served, cache = Served(blocks), blocks._texts["rows"].folder
    before = sorted(cache.rglob("*"))
    assert [*received_lengths(served.lengths([second, first]))] == [first]
    good = Range(*first, 0, 0, 9, content)
    wanted = [good, Range(*second, 0, 0, 9, 7), good._replace(content=content ^ 1), good._replace(document=999)]
    answers = [*received_slices(served.slices(received_ranges(ranges_payload(wanted))))]
    assert [one is not None for one in answers] == [True, False, False, False]
    assert sorted(cache.rglob("*")) == before


RANGES = st.builds(
    Range,
    st.text(max_size=3),
    *[st.integers(0, 2**40) for _ in range(4)],
    st.integers(0, 2**64 - 1),
)


@given(st.lists(RANGES))
def test_ranges_travel(wanted: list[Range]) -> None:
    assert received_ranges(ranges_payload(wanted)) == wanted


@st.composite
def slices(draw: st.DrawFn) -> Slice | None:
    tokens = np.array(draw(st.lists(st.integers(0, 2**31 - 1), max_size=20)), dtype=np.int64)
    masks = draw(st.none() | st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    counted = None if masks is None else np.array(masks, dtype=np.bool_)
    return draw(st.sampled_from([None, Slice(tokens, counted)]))


@given(st.lists(slices()))
def test_slices_travel(given_: list[Slice | None]) -> None:
    found = received_slices(to_bytes(None, joined(given_)))
    assert len(found) == len(given_)
    for one, other in zip(found, given_, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.tokens.tolist() == other.tokens.tolist() and one.tokens.dtype == np.int64
            counted = np.ones(len(other.tokens), dtype=np.bool_) if other.counted is None else other.counted
            assert (one.counted is None and counted.all()) or one.counted.tolist() == counted.tolist()
