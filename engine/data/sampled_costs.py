"""Measures what it costs a loader to pack blocks of each source, on a sample, in a loader as a run has."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from numpy.random import Generator, Philox

from engine.config import schema
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.work import Cost, Work
from engine.data.parts import Tokens
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import with_transform

_POLL_S = 0.01
_BYTES, _BLOCKS = 32 << 20, 9  # of the sample of a source, at most; at least two blocks if it has them


def sampled_costs(
    sources: Mapping[str, schema.Data], seed: int, progress: Callable[[float], None] = lambda done: None
) -> dict[str, Cost]:
    """Return the cost of some blocks of each source, chosen at random with `seed`; none of a token file.

    Each source has a loader of its own, so that its peak memory is that of the source. The first block, for which the
    loader imports its libraries, does not count if there is another. Nothing is left of what is packed. Raises
    DataError for a document that cannot be used.
    """
    found = dict[str, Cost]()
    for number, (name, data) in enumerate(sources.items()):
        if data.format != "tokens":
            found[name] = _of_source(data, seed)
        progress((number + 1) / len(sources))
    return found


def _of_source(data: schema.Data, seed: int) -> Cost:
    blocks = with_transform(FORMATS[data.format].blocks(data), data)
    tokens, chosen, size = Tokens.of(data), list[Work](), 0
    with tempfile.TemporaryDirectory() as folder, closing(Loaders(1, _BYTES * 4)) as loaders:
        for number in Generator(Philox(key=seed)).permutation(len(blocks)).tolist():
            if len(chosen) == _BLOCKS or (len(chosen) > 1 and size + blocks[number].size > _BYTES):
                break
            chosen.append(Work(tokens, Path(folder), blocks[number]))
            size += blocks[number].size
        costs = list[Cost]()
        for work in chosen:  # one by one: the costs have the order of the blocks
            loaders.ask([work])
            while loaders.has(work.part()):
                time.sleep(_POLL_S)
            work.pack()  # raises the error of a block that the loader could not pack
            costs += loaders.packed().values()
    total = Cost()
    for cost in costs[1:] or costs:
        total = total.plus(cost)
    return total
