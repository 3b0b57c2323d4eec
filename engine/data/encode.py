"""The tokens of a document: of a text, of token ids that were made elsewhere, or of a chat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.data.sources.source import Document
from engine.data.tokenizers.tokenizer import Ids, Tokenizer
from engine.errors import DataError


def encode(document: Document, tokenizer: Tokenizer) -> tuple[Ids, NDArray[np.bool_] | None]:
    """Return the ids of a document, int32 [n], none for an empty one, and which count as labels, [n]; None: all.

    Texts get BOS and EOS; token ids are unchanged; chats have the tokens that the chat template writes. Raises
    DataError, which names the place, for a document that cannot be used, and for ids that the tokenizer does not have.
    """
    if document.problem is not None:
        raise document.problem
    try:
        if document.text is not None:
            if not document.text:
                return np.empty(0, dtype=np.int32), None
            ids = tokenizer.document(document.text)
            return ids, _after_prompt(ids, document.text[: document.prompt], tokenizer) if document.prompt else None
        if document.messages is not None:
            return tokenizer.chat(document.messages, document.tools, document.trained)
    except DataError as error:
        (problem,) = error.problems
        raise DataError(problem.message, key=document.place, hint=problem.hint) from error
    assert document.ids is not None
    if len(document.ids) and document.ids.max() >= tokenizer.vocabulary:
        message = f"has token {document.ids.max()}, but {tokenizer.kind} has a vocabulary of {tokenizer.vocabulary:,}"
        raise DataError(message, key=document.place, hint="set data.tokenizer to the tokenizer that made the ids")
    return document.ids.astype(np.int32), document.mask


def _after_prompt(ids: Ids, prompt: bytes, tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return which ids of a document count that begins with a prompt, [n]: a token across the border counts.

    Tokens that the prompt alone has, too, are of the prompt.
    """
    alone = tokenizer.document(prompt)
    count = min(len(ids), len(alone)) - (tokenizer.eos is not None)
    same = ids[:count] == alone[:count]
    return np.arange(len(ids)) >= (count if same.all() else int(same.argmin()))
