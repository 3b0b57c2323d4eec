"""The tokens of a document: of a text, of token ids that were made elsewhere, or of a chat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.data.sources.source import Document
from engine.data.tokenizers.tokenizer import Ids, Tokenizer
from engine.errors import DataError


def encode(document: Document, tokenizer: Tokenizer) -> tuple[Ids, NDArray[np.bool_] | None]:
    """Return the ids of a document, int32 [n], none for an empty one, and which count as labels, [n]; None: all.

    Texts get BOS and EOS; token ids stay as they are; chats have what the chat template writes. Raises DataError, which
    names the place, for a document that cannot be used, and for ids that the tokenizer does not have.
    """
    if document.problem is not None:
        raise document.problem
    try:
        if document.text is not None:
            return tokenizer.document(document.text) if document.text else np.empty(0, dtype=np.int32), None
        if document.messages is not None:
            return tokenizer.chat(document.messages, document.tools)
    except DataError as error:
        (problem,) = error.problems
        raise DataError(problem.message, key=document.place, hint=problem.hint) from error
    assert document.ids is not None
    if len(document.ids) and document.ids.max() >= tokenizer.vocabulary:
        message = f"has token {document.ids.max()}, but {tokenizer.kind} has a vocabulary of {tokenizer.vocabulary:,}"
        raise DataError(message, key=document.place, hint="set data.tokenizer to the tokenizer that made the ids")
    return document.ids.astype(np.int32), document.mask
