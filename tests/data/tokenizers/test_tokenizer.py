from __future__ import annotations

import numpy as np
import pytest

from engine.data.tokenizers.bytes import BOS, EOS, ByteCodec
from engine.data.tokenizers.tokenizer import Loaded, Tokenizer, as_text, make
from engine.errors import DataError
from tests.refusals import refused

NONE = Loaded(ByteCodec(), 258, None, None, adds_bos=True)


def made(bos: bool | None, eos: bool | None, adds_bos: bool = True, content: bytes = b"") -> Tokenizer:
    return make("bytes", Loaded(ByteCodec(), 258, BOS, EOS, adds_bos), content, "place", bos, eos)


@pytest.mark.parametrize(
    ("bos", "eos", "adds_bos", "document"),
    [
        (None, None, True, [BOS, 97, EOS]),
        (None, None, False, [97, EOS]),
        (True, False, False, [BOS, 97]),
        (False, True, True, [97, EOS]),
        (False, False, True, [97]),
    ],
)
def test_the_policy_decides_the_ends_of_documents(
    bos: bool | None, eos: bool | None, adds_bos: bool, document: list[int]
) -> None:
    tokenizer = made(bos, eos, adds_bos)
    assert tokenizer.document("a").tolist() == document
    assert tokenizer.document("a").dtype == tokenizer.encode("a").dtype == np.int32
    assert (tokenizer.bos in document, tokenizer.eos in document) == (BOS in document, EOS in document)


@pytest.mark.parametrize(("bos", "eos", "named"), [(True, None, "BOS"), (None, True, "EOS")])
def test_a_token_that_does_not_exist_is_refused(bos: bool | None, eos: bool | None, named: str) -> None:
    with refused(DataError, "place") as problems:
        make("bytes", NONE, b"", "place", bos, eos)
    assert f"{named}" in problems[0].message
    assert problems[0].key == "place"
    assert "null or false" in str(problems[0].hint)
    assert make("bytes", NONE, b"", "place", None, None).document("a").tolist() == [97]


def test_fingerprints_differ_with_whatever_decides_ids() -> None:
    """A resumed run compares them: an equal one must mean equal documents."""
    prints = {made(bos, eos).fingerprint for bos in (True, False) for eos in (True, False)}
    prints |= {made(True, True, content=b"x").fingerprint, make("tekken", NONE, b"", "", False, False).fingerprint}
    assert len(prints) == 6
    assert made(None, None).fingerprint == made(True, True).fingerprint


@pytest.mark.parametrize(
    ("text", "place"), [(b"ab\xff", "byte 2"), ("a\ud800", "character 1"), (b"\xed\xa0\x80", "byte 0")]
)
def test_what_is_not_utf8_is_refused(text: str | bytes, place: str) -> None:
    """tiktoken and sentencepiece would replace it in silence."""
    with refused(DataError) as problems:
        as_text(text)
    assert f"{place}" in problems[0].message
