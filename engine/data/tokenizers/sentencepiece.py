"""SentencePiece models, read by the package sentencepiece.

Conversion changes ids: Mixtral's model, converted by transformers, differs on 59 of 60 Python files (runs of spaces).
The library never matches control symbols, such as <s>, in a text. It matches user-defined symbols anywhere, without an
option: they are ordinary vocabulary, and the library reports no BOS or EOS that is one. Time grows linearly, also for
runs without spaces (1M letters: .3 s).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.data.tokenizers.tokenizer import Ids, Loaded, as_text
from engine.errors import DataError

if TYPE_CHECKING:
    import sentencepiece


class SentencePieceCodec:
    """A SentencePiece model."""

    def __init__(self, model: sentencepiece.SentencePieceProcessor) -> None:
        self._model = model

    def encode(self, text: str | bytes) -> Ids:
        """Return the ids of a text, [n]."""
        ids: Ids = self._model.encode(as_text(text), out_type="numpy").astype(np.int32, copy=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; control symbols are left out."""
        return str(self._model.decode(ids))


def load(path: Path, content: bytes) -> Loaded:
    """Open a SentencePiece model. BOS and EOS are its own; BOS is added if it has one. Raises DataError."""
    import sentencepiece

    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        hint = "copy the file again: it may be cut off"
        raise DataError("is not a SentencePiece model", key=str(path), hint=hint) from error
    bos, eos = (token if token >= 0 else None for token in (model.bos_id(), model.eos_id()))
    return Loaded(SentencePieceCodec(model), model.vocab_size(), bos, eos, adds_bos=bos is not None)
