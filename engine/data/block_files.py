"""The file in which the launcher lists the blocks of texts of a run, once for all of its processes.

```
 {"sources": ["web", "code"], "tokenizer": "1f0c...", "packed": {}}  the fingerprint of the tokenizer; see `Placed`
 ["web", "JsonlBlock", {"path": "web.jsonl", "field": "text", "ranges": [[0, 1048576]], "length": 1048576}]
 ...                                                                a line for each block, in the order of its source
```
It is JSON, because a run folder may be someone else's: reading a pickle can run any code.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from sys import intern
from typing import Any

from engine.data.blocks.blocks import BlockId
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Block
from engine.errors import DataError
from engine.files import write_durably
from engine.readers import open_regular, parse_line

# Blocks that the launcher has packed, each with the identity of its cache: the hosts of a run need not pack them.
Placed = Mapping[BlockId, str]


def write_blocks(
    path: Path, blocks: Mapping[str, Sequence[Block]], tokenizer: str | None, placed: Placed | None = None
) -> None:
    """List the blocks of all sources of texts, with the fingerprint of their tokenizer; None if there are none.

    Raises OSError if writing fails.
    """
    packed = defaultdict[str, list[BlockId]](list)
    for block, identity in (placed or {}).items():
        packed[identity].append(block)
    lines = [json.dumps({"sources": [*blocks], "tokenizer": tokenizer, "packed": packed})]
    for name, listed in blocks.items():
        lines += (json.dumps([name, type(block).__name__, vars(block)]) for block in listed)
    write_durably(path, "\n".join([*lines, ""]).encode())


def read_blocks(path: Path) -> tuple[dict[str, list[Block]], str | None]:
    """Return the blocks of each source, and the fingerprint of the tokenizer.

    Raises DataError if another version of this program has listed them.
    """
    classes = {form.block.__name__: form.block for form in FORMATS.values()}
    try:
        with open_regular(path) as file:
            first = parse_line(file.readline())
            tokenizer: str | None = first["tokenizer"]
            blocks: dict[str, list[Block]] = {name: [] for name in first["sources"]}
            for line in file:
                name, kind, values = parse_line(line)
                blocks[name].append(classes[kind](**{key: _value(value) for key, value in values.items()}))
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError) as error:
        message, hint = "does not list the blocks of a run of this version", "resume the run, which writes it again"
        raise DataError(message, key=str(path), hint=hint) from error
    return blocks, tokenizer


def read_placed(path: Path) -> Placed:
    """Return the blocks that the launcher had packed. Raises DataError as `read_blocks`."""
    with open_regular(path) as file:
        packed = parse_line(file.readline()).get("packed", {})
    return {BlockId(*block): identity for identity, blocks in packed.items() for block in blocks}


def _value(value: Any) -> Any:
    """Return the field of a block. JSON has lists for tuples, and a string for each time that a path occurs."""
    if isinstance(value, list):
        return tuple(map(_value, value))
    return intern(value) if isinstance(value, str) else value
