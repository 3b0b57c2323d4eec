"""Every implementation of Blocks does what conformance.py asks. A new runtime is a line of MAKE.

Those on Ray share its start with other tests of it (tests/remote/test_ray.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.blocks.blocks import Blocks, masked_within
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.texts import Texts
from tests.data.blocks.conformance import Documents, Given, TestBlocks, given_texts  # noqa: F401
from tests.data.blocks.hosts import Several
from tests.data.blocks.in_memory import MemoryBlocks
from tests.data.memory import MemoryLengths

# An implementation gets the sources of texts; that of tests gets their documents.
MAKE: dict[str, Callable[[Mapping[str, Texts], Documents], Blocks]] = {
    "memory": lambda texts, made: MemoryBlocks(made),
    "local": lambda texts, made: LocalBlocks(texts),
    "local with loaders": lambda texts, made: LocalBlocks(texts, Loaders(2, 1 << 40)),
    "peers": lambda texts, made: Several(texts, 3).blocks[0],
    "peers with loaders": lambda texts, made: Several(texts, 2, loaders=1).blocks[1],
}


@pytest.fixture(params=MAKE)
def given_blocks(request: pytest.FixtureRequest, given_texts: tuple[Mapping[str, Texts], Documents]) -> Iterator[Given]:  # noqa: F811
    """Blocks of an implementation."""
    blocks = MAKE[request.param](*given_texts)
    yield Given(blocks, given_texts[1])
    blocks.close()


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=6)


@given(masks, st.data())
def test_the_masked_tokens_of_ranges_are_those_of_runs(masks: list[list[bool]], data: st.DataObject) -> None:
    lengths = MemoryLengths(
        np.array([len(mask) - 1 for mask in masks]), np.zeros(len(masks), dtype=np.uint64), [*map(np.array, masks)]
    )
    wanted, expected = list[tuple[int, int, int]](), list[int]()
    for _ in range(data.draw(st.integers(0, 6))):
        document = data.draw(st.integers(0, len(masks) - 1))
        start = data.draw(st.integers(0, len(masks[document])))
        stop = data.draw(st.integers(start, len(masks[document])))
        wanted.append((document, start, stop))
        expected.append(sum(masks[document][start:stop]))
    assert masked_within(lengths, *np.array(wanted, dtype=np.int64).reshape(-1, 3).T).tolist() == expected
