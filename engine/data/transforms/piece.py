"""What a transform gets and returns: a document, or a part of one, with its tokens when they are needed."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from engine.data.encode import encode
from engine.data.sources.source import Document
from engine.data.tokenizers.tokenizer import Ids, Tokenizer


class Piece:
    """A document or a part of one. Its length is a number of inputs: tokens that have a next one as their label."""

    def __init__(self, document: Document, tokenizer: Tokenizer) -> None:
        self.document, self.tokenizer = document, tokenizer

    @cached_property
    def encoded(self) -> tuple[Ids, NDArray[np.bool_] | None]:
        """The ids and the mask that `encode` returns, and its errors."""
        return encode(self.document, self.tokenizer)

    @property
    def inputs(self) -> int:
        return max(0, len(self.encoded[0]) - 1)

    @property
    def content(self) -> bytes:
        """What decides its hash: the text, or the ids, and the mask if a label does not count."""
        ids, mask = self.encoded
        content = ids.astype("<i8").tobytes() if self.document.text is None else self.document.text
        if mask is None or mask.all():
            return content
        return content + np.packbits(mask, bitorder="little").tobytes()  # other labels are another document

    def of_text(self, text: bytes) -> Piece:
        """Return the part with this text."""
        return Piece(self.document._replace(text=text), self.tokenizer)

    def first(self, inputs: int) -> Piece:
        """Return the part with the first inputs."""
        ids, mask = self.encoded
        mask = None if mask is None else mask[: inputs + 1]
        return Piece(Document(self.document.place, None, ids[: inputs + 1].astype(np.int64), mask), self.tokenizer)
