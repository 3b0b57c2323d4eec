"""The table of transforms. To add one, write a module in this folder and add an entry here.

`transform` of a source is a list of steps, each the name of a transform with its options. They are applied to each
document in turn, when its block is packed:

```
 transform: [{split: {tokens: 4K}}, {drop: {shorter: 64}}]

 document ---- split ---- piece ---- drop ---- piece           a document in the token file of the block
                    \\---- piece ---- drop                      counted as left out
```
A transform is a pure function of the document, its options and the tokenizer. The steps are part of the name of a block
in the cache, and of the fingerprint of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from engine.config.schema import Section
from engine.data.sources.source import Document
from engine.data.tokenizers.tokenizer import Tokenizer
from engine.data.transforms.drop import Drop, drop
from engine.data.transforms.piece import Piece
from engine.data.transforms.split import Split, split
from engine.data.transforms.truncate import Truncate, truncate
from engine.readers import parse_line
from engine.tables import Table


@dataclass(frozen=True)
class Transform:
    """A transform, and what others need to know of it.

    options: the keys of a step, with their bounds.
    apply: `apply(piece, options)` returns what becomes of a piece; nothing if it is left out. Raises DataError for a
        document that it cannot be applied to.
    of_texts: it needs the text or the messages of a document.
    to_ids: of what it changes, only the token ids are left.
    """

    options: type[Section]
    apply: Callable[[Piece, Any], Sequence[Piece]]
    of_texts: bool = False
    to_ids: bool = False


TRANSFORMS: Table[Transform] = Table(
    Transform,
    {
        "drop": Transform(Drop, drop),
        "truncate": Transform(Truncate, truncate, to_ids=True),
        "split": Transform(Split, split, of_texts=True),
    },
)


def transformed(document: Document, steps: str, tokenizer: Tokenizer) -> tuple[list[Piece], int]:
    """Apply the `transform` of a block to a document. Returns the pieces, and how many were left out.

    Raises DataError as `encode` does, and for a document that a step cannot be applied to.
    """
    pieces, dropped = [Piece(document, tokenizer)], 0
    if document.problem is not None:
        raise document.problem
    for transform, options in _parsed(steps) if steps and not _is_empty(document) else ():
        found = list[Piece]()
        for piece in pieces:
            results = transform.apply(piece, options)
            dropped += not results
            found += results
        pieces = found
    return pieces, dropped


def _is_empty(document: Document) -> bool:
    return document.text == b"" or (document.ids is not None and not len(document.ids))


@lru_cache
def _parsed(steps: str) -> list[tuple[Transform, Section]]:
    found = [one for step in parse_line(steps) for one in step.items()]
    return [(TRANSFORMS[name], TRANSFORMS[name].options.model_validate(options)) for name, options in found]
