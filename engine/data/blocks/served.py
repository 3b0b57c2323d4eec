"""Two questions about the blocks of a host that another host may ask: the lengths of blocks, the tokens of ranges.

```
 another host                                                    host that has packed the block
 lengths_payload <---- inputs, hashes, masked runs, left out --- Served.lengths([web:7, code:2])
 slices_payload  <---- tokens, bits of those that count -------- Served.slices([web:7:12 [0, 4097), ...])
```
Each is for many blocks in one message of plain arrays (`engine/data/arrays.py`). Nothing is packed for an answer: a
block that is not packed is missing in it, as is one that cannot be read; whoever needs it then waits, or packs it. So
questions about packed blocks never wait for others to be packed.

Letters: R ranges, N tokens of all ranges, D documents of all blocks, M masked runs of all blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.data.arrays import from_bytes, to_bytes
from engine.data.blocks.blocks import BlockId, Lengths, Range, Slice
from engine.data.blocks.known import KnownLengths
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.parts import LeftOut
from engine.errors import DataError, StorageError


class Served:
    """Answers the questions of other hosts from the blocks that this one has packed, in any thread."""

    def __init__(self, blocks: LocalBlocks) -> None:
        self._blocks = blocks

    def lengths(self, wanted: Sequence[BlockId]) -> bytes:
        """Return the lengths of those of the blocks that are packed, as `received_lengths` reads them."""
        found = dict[BlockId, Lengths]()
        for block in wanted:
            with suppress(DataError, StorageError):
                if self._blocks.is_packed(block):
                    found[block] = self._blocks.lengths(block)
        return lengths_payload(found)

    def slices(self, wanted: Sequence[Range]) -> bytes:
        """Return the tokens of those of the ranges whose blocks are packed, as `received_slices` reads them.

        A range of a document that is another one here than was chosen is missing, too.
        """
        packed = {block for block in {BlockId(*one[:2]) for one in wanted} if self._blocks.is_packed(block)}
        found = list[Slice | None]()
        for one in wanted:
            found.append(None)
            if one[:2] in packed:
                with suppress(DataError, StorageError):
                    (found[-1],) = self._blocks.slices([one])
        return to_bytes(None, joined(found))


def lengths_payload(blocks: Mapping[BlockId, Lengths]) -> bytes:
    """Return the lengths of blocks as a buffer."""
    head = list[Any]()
    counts, hashes = [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=np.uint64)]
    runs = [np.empty((0, 3), dtype=np.int32)]
    for block, lengths in blocks.items():
        counts.append(lengths.inputs().astype(np.int32))
        hashes.append(lengths.hash())
        runs.append(lengths.runs().astype(np.int32))
        head.append([*block, len(lengths), len(runs[-1]), lengths.left_out])
    arrays: dict[str, NDArray[Any]] = {"inputs": np.concatenate(counts), "hashes": np.concatenate(hashes)}
    return to_bytes(head, arrays | {"runs": np.concatenate(runs)})


def received_lengths(payload: bytes) -> dict[BlockId, KnownLengths]:
    """Return the lengths of the blocks of a payload. Raises ValueError for another buffer."""
    head, arrays = from_bytes(payload)
    found, document, run = dict[BlockId, KnownLengths](), 0, 0
    for source, block, documents, runs, left_out in head:
        here, rows = slice(document, document + documents), slice(run, run + runs)
        # Copies, so that a block which is kept does not keep the others.
        columns = arrays["inputs"][here].copy(), arrays["hashes"][here].copy(), arrays["runs"][rows].copy()
        facts = None if left_out is None else LeftOut.of_json(dict(zip(LeftOut._fields, left_out, strict=True)))
        found[BlockId(source, block)] = KnownLengths(facts, *columns)
        document, run = here.stop, rows.stop
    return found


def ranges_payload(wanted: Sequence[Range]) -> bytes:
    """Return ranges as a buffer."""
    names = sorted({one.source for one in wanted})
    number = {name: at for at, name in enumerate(names)}
    places = np.array([(number[one.source], *one[1:5]) for one in wanted], dtype=np.int64).reshape(-1, 5)
    return to_bytes(names, {"places": places, "contents": np.array([one.content for one in wanted], dtype=np.uint64)})


def received_ranges(payload: bytes) -> list[Range]:
    """Return the ranges of a payload. Raises ValueError for another buffer."""
    names, arrays = from_bytes(payload)
    rows = zip(arrays["places"].tolist(), arrays["contents"].tolist(), strict=True)
    return [Range(names[row[0]], row[1], row[2], row[3], row[4], content) for row, content in rows]


def joined(slices: Sequence[Slice | None]) -> dict[str, NDArray[Any]]:
    """Return slices as arrays: lengths, int32 [R], -1 for None; tokens, int32 [N]; and which tokens count.

    These are bits, uint8 [N / 8, rounded up]; [0] if all count.
    """
    known = [one for one in slices if one is not None]
    tokens = np.concatenate([np.empty(0, dtype=np.int64), *(one.tokens for one in known)])
    masks = [np.ones(len(one.tokens), dtype=np.bool_) if one.counted is None else one.counted for one in known]
    bits = np.concatenate(masks) if any(one.counted is not None for one in known) else np.empty(0, dtype=np.bool_)
    lengths = np.array([-1 if one is None else len(one.tokens) for one in slices], dtype=np.int32)
    return {"lengths": lengths, "tokens": tokens.astype(np.int32), "counted": np.packbits(bits)}


class Parted:
    """The slices that `joined` has made arrays of. Each is made when it is read."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._lengths, self._tokens, self._bits = arrays["lengths"], arrays["tokens"], arrays["counted"]
        self._ends = np.cumsum(np.maximum(self._lengths, 0), dtype=np.int64)

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[Slice | None]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Slice | None:
        length, stop = int(self._lengths[number]), int(self._ends[number])
        if length < 0:
            return None
        start, counted = stop - length, None
        if len(self._bits):
            counted = np.unpackbits(self._bits[start // 8 : -(-stop // 8)])[start % 8 :][:length].astype(np.bool_)
        return Slice(self._tokens[start:stop].astype(np.int64), counted)


def received_slices(payload: bytes) -> Parted:
    """Return the slices of a payload. Raises ValueError for another buffer."""
    return Parted(from_bytes(payload)[1])
