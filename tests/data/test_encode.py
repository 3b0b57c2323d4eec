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
from tests.refusals import refused

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


def test_a_prompt_does_not_count_but_a_token_across_its_end_does(tmp_path: Path) -> None:
    for tokenizer in (open_tokenizer("bytes"), open_tokenizer(str(chat_folder(tmp_path, None)))):
        text = b"import sys\nimport os"
        for prompt in range(len(text)):
            ids, mask = encode(Document("p", text, prompt=prompt), tokenizer)
            assert ids.tolist() == tokenizer.document(text).tolist()
            if prompt == 0:
                assert mask is None
                continue
            assert mask is not None and mask[-1] and not mask[0]
            before, after = tokenizer.decode(ids[~mask][1:]), tokenizer.decode(ids[mask][:-1])  # no BOS and EOS
            assert before + after == text.decode() and text[prompt:].decode() in after
            if tokenizer.kind == "bytes":
                assert len(before) == prompt


@pytest.mark.parametrize(
    ("document", "value"),
    [
        (Document("p", None, messages=CHAT), "bytes"),
        (Document("p", None, np.array([258])), "token 258"),
        (Document("p", None, problem=DataError("is broken", key="p", hint="mend it")), "is broken"),
    ],
)
def test_what_cannot_be_encoded_is_refused_by_its_place(document: Document, value: str) -> None:
    with refused(DataError, "p") as problems:
        encode(document, open_tokenizer("bytes"))
    assert value in problems[0].message
