"""A source of documents in memory, and the steps of several: for tests of orders and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engine.config.load import load
from engine.config.schema import Config, Segment, Source
from engine.data.blocks.blocks import Range, Slice
from engine.data.corpus import Corpus
from engine.data.order import ORDER
from engine.data.parts import LeftOut
from engine.data.sequences import SequenceTable
from engine.data.steps import Cursor, Steps
from engine.units import Ints

Exhausted = Literal["repeat", "drop", "stop"]
TRAINED, VALIDATED = 2**63, 0  # hashes of documents


class MemoryLengths:
    """Lengths of a block of documents, with the mask of each: true for tokens that do not count."""

    left_out: LeftOut | None = None

    def __init__(self, inputs: Ints, hashes: NDArray[np.uint64], masks: Sequence[NDArray[np.bool_]]) -> None:
        self._inputs, self._hashes, self._masks = inputs, hashes, masks

    def __len__(self) -> int:
        return len(self._inputs)

    def inputs(self) -> Ints:
        return self._inputs

    def hash(self, first: int = 0, last: int | None = None) -> NDArray[np.uint64]:
        return self._hashes[first:last]

    def runs(self) -> Ints:
        runs = list[tuple[int, int, int]]()
        for document, mask in enumerate(self._masks):
            begin = 0
            for masked, tokens in groupby(mask.tolist()):
                end = begin + len([*tokens])
                runs += [(document, begin, end)] if masked else []
                begin = end
        return np.array(runs, dtype=np.int64).reshape(-1, 3)


class Memory:
    """A corpus of blocks of documents, of which it has the inputs. `opened` lists the blocks that were opened.

    Documents with a number in `validation`, counted over all blocks, are for validation, and those in `masked` count
    every second label.
    """

    vocabulary, ends, fingerprint = 258, (256, 257), "f"

    def __init__(
        self,
        blocks: Sequence[Sequence[int]],
        name: str = "data",
        validation: Sequence[int] = (),
        share: float = 0.25,
        bytes_: int | Sequence[int] = 1 << 20,
        masked: Sequence[int] = (),
    ) -> None:
        self.name, self.place, self.share, self.blocks = name, f"memory {name}", share, len(blocks)
        self.sizes, self._bytes = blocks, bytes_
        self._first = np.cumsum([0, *map(len, blocks)])
        self._validation, self._masked = {*validation}, {*masked}
        self.opened: list[int] = []

    def size(self, block: int) -> int:
        return self._bytes if isinstance(self._bytes, int) else self._bytes[block]

    def files(self, block: int) -> list[str]:
        return [f"{self.place}, block {block}"]

    def number(self, block: int, document: int) -> int:
        """The number of a document, counted over all blocks."""
        return int(self._first[block]) + document

    def lengths(self, block: int) -> MemoryLengths:
        self.opened.append(block)
        inputs = np.array(self.sizes[block], dtype=np.int64)
        numbers = [self.number(block, document) for document in range(len(inputs))]
        hashes = np.array([self.hash_of(number) for number in numbers], dtype=np.uint64)
        # Every second token, the first one too.
        masked = [
            np.arange(count + 1 if number in self._masked else 0) % 2 == 0
            for number, count in zip(numbers, inputs, strict=True)
        ]
        return MemoryLengths(inputs, hashes, masked)

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        raise NotImplementedError("these documents have no tokens")

    def hash_of(self, number: int) -> int:
        """The hash of a document: its number beyond TRAINED or VALIDATED."""
        return (VALIDATED if number in self._validation else TRAINED) + number


@cache
def _base() -> Config:
    return load(["recipe=quickstart"])


def config_of(
    batch_tokens: int,
    context: int,
    seed: int = 0,
    long: Literal["step", "split"] = "step",
    validation_tokens: int = 0,
) -> Config:
    """A config without any check of its values."""
    data = _base().data.model_copy(update={"long": long, "validation_tokens": validation_tokens})
    run = _base().run.model_copy(update={"seed": seed})
    return _base().model_copy(update={"batch_tokens": batch_tokens, "context": context, "data": data, "run": run})


def steps_of(
    corpora: Sequence[Corpus],
    config: Config,
    mix: Mapping[str, float] | Sequence[Segment] | None = None,
    exhausted: Exhausted | Mapping[str, Exhausted] = "repeat",
    kind: type[Steps] = Steps,
) -> Steps:
    """The steps of some sources. Without a `mix`, all have the same weight. `exhausted` is for all or by name."""
    names = [corpus.name for corpus in corpora]
    if mix is None or isinstance(mix, Mapping):
        mix = [Segment(weights=dict(mix or dict.fromkeys(names, 1.0)))]
    policies = dict.fromkeys(names, exhausted) if isinstance(exhausted, str) else exhausted
    sources = {name: Source(exhausted=policies[name]) for name in names}
    data = config.data.model_copy(update={"sources": sources, "mix": tuple(mix)})
    return kind(corpora, config.model_copy(update={"data": data}))


Step = tuple[SequenceTable, Cursor]  # and the cursor after it


def run(steps: Steps, most: int, cursor: Cursor | None = None) -> list[Step]:
    """At most `most` steps, fewer if the documents are used up."""
    found, cursor = list[Step](), cursor or Cursor()
    while len(found) < most and (step := steps.next(cursor)) is not None:
        found.append(step)
        cursor = step[1]
    return found


def epochs(steps: Steps, name: str, count: int, order: int = ORDER) -> list[Step]:
    """All steps until a source has begun epoch `count`, or until the documents are used up."""
    found, cursor = list[Step](), Cursor(order=order)
    while (cursor.places.get(name) or (0,))[0] < count and (step := steps.next(cursor)) is not None:
        found.append(step)
        cursor = step[1]
    return found


def rows(table: SequenceTable) -> list[tuple[int, ...]]:
    """(source, block, document, start, length) of each sequence."""
    columns = table.source, table.block, table.document, table.start, table.length
    return list(zip(*map(np.ndarray.tolist, columns), strict=True))


def pieces(table: SequenceTable, corpora: Sequence[Memory]) -> list[tuple[int, int, int]]:
    """(number of the document, start, length) of each sequence."""
    return [(corpora[s].number(b, d), start, length) for s, b, d, start, length in rows(table)]


def same(one: SequenceTable, other: SequenceTable) -> bool:
    """Whether two tables are equal in all columns."""
    columns: list[Callable[[SequenceTable], Ints]] = [
        lambda table, name=name: getattr(table, name)  # type: ignore[misc]
        for name in SequenceTable.__dataclass_fields__
    ]
    return all(np.array_equal(column(one), column(other)) for column in columns)
