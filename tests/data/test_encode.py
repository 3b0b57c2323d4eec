"""The tokens of each kind of document, and refusals that name the document."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.data.encode import encode
from engine.data.sources.source import Document
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError
from tests.data.tokenizers.chat_folder import CHATML, chat_folder

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_texts_ids_and_chats(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(chat_folder(tmp_path, CHATML)))
    for text in (b"a text", b""):
        ids, mask = encode(Document("p", text), tokenizer)
        assert ids.tolist() == (tokenizer.document(text).tolist() if text else []) and mask is None
    counted = np.array([False, True, True])
    ids, mask = encode(Document("p", None, np.array([5, 6, 7]), counted), tokenizer)
    assert (ids.tolist(), ids.dtype, mask) == ([5, 6, 7], np.int32, counted)
    ids, mask = encode(Document("p", None, messages=CHAT), tokenizer)
    assert mask is not None and tokenizer.decode(ids[mask]) == "b<|im_end|>"


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (Document("p", None, messages=CHAT), "has no chat template"),
        (Document("p", None, np.array([258])), "has token 258, but bytes has a vocabulary of 258"),
        (Document("p", None, problem=DataError("is broken", key="p")), "is broken"),
    ],
)
def test_what_cannot_be_encoded_is_refused_by_its_place(document: Document, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        encode(document, open_tokenizer("bytes"))
    assert caught.value.problems[0].key == "p"
