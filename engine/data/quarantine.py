"""RUN/quarantine.jsonl: the documents that were left out because they cannot be used, with the reason.

Each line is a JSON object: step, source, block, document (its number among all documents of the block), place, reason.
A document is listed once, even if the run is resumed, with the step for which it was first read.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.data.blocks.blocks import BlockId
from engine.files import append
from engine.readers import LARGE, parse_line, read_bytes

MOST = 10_000  # documents that are listed


class Unusable(NamedTuple):
    """A document that was left out."""

    source: str
    block: int
    document: int  # number among all documents of the block
    place: str
    reason: str


class Dropped:
    """How many documents transforms have left out of the blocks that were opened. Each block counts once."""

    def __init__(self) -> None:
        self.documents = 0
        self._counted = defaultdict[str, bytearray](bytearray)  # of each source, whether it is, by number of the block

    def add(self, found: Mapping[BlockId, int]) -> None:
        """Count the documents that were left out of some blocks, unless they have been counted."""
        for (source, block), documents in found.items():
            counted = self._counted[source]
            counted.extend(bytes(max(0, block + 1 - len(counted))))
            self.documents += 0 if counted[block] else documents
            counted[block] = True


class Quarantine:
    """The list of a run. One process writes it."""

    def __init__(self, path: Path, most: int = MOST) -> None:
        self._path, self._most = path, most
        self._listed: set[tuple[str, int, int]] | None = None  # source, block, document; None before the first use

    def add(self, step: int, found: Sequence[Unusable]) -> int:
        """List the documents that are not listed yet. Returns how many are; beyond `most`, no more are added.

        Raises OSError if reading or writing fails.
        """
        if self._listed is None:
            self._listed = self._read()
        lines = []
        for one in found:
            key = one.source, one.block, one.document
            if key not in self._listed and len(self._listed) < self._most:
                self._listed.add(key)
                lines.append(json.dumps({"step": step, **one._asdict()}) + "\n")
        if lines:
            with append(self._path) as file:
                file.write("".join(lines).encode())
                file.flush()
                os.fsync(file.fileno())
        return len(self._listed)

    def _read(self) -> set[tuple[str, int, int]]:
        """Read the listed documents. Drops an incomplete last line and any malformed line."""
        try:
            content = read_bytes(self._path, LARGE)
        except FileNotFoundError:
            return set()
        listed, size = set[tuple[str, int, int]](), 0
        for line in content.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                found = parse_line(line)
                listed.add((found["source"], found["block"], found["document"]))
            except (ValueError, KeyError, TypeError):
                break
            size += len(line)
        with append(self._path) as file:
            file.truncate(size)
        return listed
