"""Documents for tests of transforms."""

from __future__ import annotations

import numpy as np

from engine.data.sources.source import Document
from engine.data.tokenizers.load import open_tokenizer
from engine.data.transforms.piece import Piece

TOKENIZER = open_tokenizer("bytes")  # a text of n bytes has n + 1 inputs: BOS, its bytes, and EOS as a label


def of_text(text: bytes, prompt: int = 0) -> Piece:
    return Piece(Document("a.txt", text, prompt=prompt), TOKENIZER)


def of_ids(*ids: int, mask: list[bool] | None = None) -> Piece:
    return Piece(Document("a", None, np.array(ids), None if mask is None else np.array(mask)), TOKENIZER)
