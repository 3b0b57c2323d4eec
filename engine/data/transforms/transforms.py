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

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from engine.config.schema import Section
from engine.data.sources.source import Document
from engine.data.tokenizers.tokenizer import Tokenizer
from engine.data.transforms.chat import Chat, chat
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
    did: what it has done to the documents that it changed, for messages.
    apply: `apply(piece, options)` returns what becomes of a piece: nothing if it is left out, the piece itself if it
        stays as it is. Raises DataError for a document that it cannot be applied to.
    of_texts: it needs the text or the messages of a document.
    to_ids: of what it changes, no text is left.
    """

    options: type[Section]
    did: str
    apply: Callable[[Piece, Any], Sequence[Piece]]
    of_texts: bool = False
    to_ids: bool = False


TRANSFORMS: Table[Transform] = Table(
    Transform,
    {
        "drop": Transform(Drop, "left out", drop),
        "truncate": Transform(Truncate, "shortened", truncate, to_ids=True),
        "split": Transform(Split, "divided", split, of_texts=True),
        "chat": Transform(Chat, "made chats of", chat, of_texts=True, to_ids=True),
    },
)


class Transformed(NamedTuple):
    """What became of a document."""

    pieces: list[Piece]
    dropped: int  # how many were left out
    changed: Counter[str]  # to how many pieces each step did something, by its name


def transformed(document: Document, steps: str, tokenizer: Tokenizer) -> Transformed:
    """Apply the `transform` of a block to a document.

    Raises DataError as `encode` does, and for a document that a step cannot be applied to.
    """
    pieces, dropped, changed = [Piece(document, tokenizer)], 0, Counter[str]()
    if document.problem is not None:
        raise document.problem
    for name, options in _parsed(steps) if steps and not _is_empty(document) else ():
        found = list[Piece]()
        for piece in pieces:
            results = TRANSFORMS[name].apply(piece, options)
            dropped += not results
            changed[name] += [*results] != [piece]
            found += results
        pieces = found
    return Transformed(pieces, dropped, changed)


def _is_empty(document: Document) -> bool:
    return document.text == b"" or (document.ids is not None and not len(document.ids))


@lru_cache
def _parsed(steps: str) -> list[tuple[str, Section]]:
    found = [one for step in parse_line(steps) for one in step.items()]
    return [(name, TRANSFORMS[name].options.model_validate(options)) for name, options in found]
