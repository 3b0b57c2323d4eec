"""Divides texts at their paragraphs.

```
 text         aaaaaa. \\n\\n bbb. \\n\\n cc. \\n\\n dddddddddd.      paragraphs end with the blank lines after them
 tokens: 8    [ a 6      ][ b 3     c 2       ][ d 10       ]      whole paragraphs, as many as have at most 8 tokens
```
"""

from __future__ import annotations

import re

from pydantic import Field

from engine.config.schema import Section
from engine.config.units import Tokens
from engine.data.transforms.piece import Piece
from engine.errors import DataError

_PARAGRAPH = re.compile(rb"\s*\S.*?(?:\n[ \t\r]*){2,}|\s*\S.*\Z|\s+\Z", re.DOTALL)


class Split(Section):
    """How long the pieces are."""

    tokens: Tokens = Field(ge=1, le=2**32, description="most tokens of the paragraphs of a piece, if it has several")


def split(piece: Piece, options: Split) -> list[Piece]:
    """Divide a text into pieces of whole paragraphs. Each is a document, with BOS and EOS if others have them.

    A piece has as many paragraphs as have at most `tokens` together, and at least one. The tokens of each paragraph are
    counted by itself, so a piece may have a few more or less, and BOS and EOS. Raises DataError for a chat, token ids,
    and a text with a prompt.
    """
    text = piece.document.text
    if text is None or piece.document.prompt:
        what = "a text with a prompt" if text is not None else "a chat" if piece.document.messages else "token ids"
        message = f"is {what}, and the transform `split` divides texts at their paragraphs"
        raise DataError(message, key=piece.document.place, hint="remove `split` from the transform of its source")
    found, begin, tokens = list[Piece](), 0, 0
    for paragraph in _PARAGRAPH.finditer(text):
        count = len(piece.tokenizer.encode(paragraph[0]))
        if tokens and tokens + count > options.tokens:
            found.append(piece.of_text(text[begin : paragraph.start()]))
            begin, tokens = paragraph.start(), 0
        tokens += count
    return [*found, piece.of_text(text[begin:])] if found else [piece]
