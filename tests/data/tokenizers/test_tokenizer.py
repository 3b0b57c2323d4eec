from __future__ import annotations

import numpy as np
import pytest

from engine.data.tokenizers.bytes import BOS, EOS, ByteCodec
from engine.data.tokenizers.tokenizer import Loaded, Policy, Tokenizer, as_text, make
from engine.errors import DataError

NONE = Loaded(ByteCodec(), 258, None, None, adds_bos=True)


def made(bos: Policy, eos: Policy, adds_bos: bool = True, content: bytes = b"") -> Tokenizer:
    return make("bytes", Loaded(ByteCodec(), 258, BOS, EOS, adds_bos), content, "place", bos, eos)


@pytest.mark.parametrize(
    ("bos", "eos", "adds_bos", "document"),
    [
        ("auto", "auto", True, [BOS, 97, EOS]),
        ("auto", "auto", False, [97, EOS]),
        ("yes", "no", False, [BOS, 97]),
        ("no", "yes", True, [97, EOS]),
        ("no", "no", True, [97]),
    ],
)
def test_the_policy_decides_the_ends_of_documents(
    bos: Policy, eos: Policy, adds_bos: bool, document: list[int]
) -> None:
    tokenizer = made(bos, eos, adds_bos)
    assert tokenizer.document("a").tolist() == document
    assert tokenizer.document("a").dtype == tokenizer.encode("a").dtype == np.int32
    assert (tokenizer.bos in document, tokenizer.eos in document) == (BOS in document, EOS in document)


@pytest.mark.parametrize(("bos", "eos", "named"), [("yes", "auto", "BOS"), ("auto", "yes", "EOS")])
def test_a_token_that_does_not_exist_is_refused(bos: Policy, eos: Policy, named: str) -> None:
    with pytest.raises(DataError, match=f"has no {named} token") as caught:
        make("bytes", NONE, b"", "place", bos, eos)
    assert caught.value.problems[0].key == "place"
    assert "auto or no" in str(caught.value.problems[0].hint)
    assert make("bytes", NONE, b"", "place", "auto", "auto").document("a").tolist() == [97]


def test_fingerprints_differ_with_whatever_decides_ids() -> None:
    """A resumed run compares them: an equal one must mean equal documents."""
    prints = {made(bos, eos).fingerprint for bos in ("yes", "no") for eos in ("yes", "no")}
    prints |= {made("yes", "yes", content=b"x").fingerprint, make("tekken", NONE, b"", "", "no", "no").fingerprint}
    assert len(prints) == 6
    assert made("auto", "auto").fingerprint == made("yes", "yes").fingerprint


@pytest.mark.parametrize(
    ("text", "place"), [(b"ab\xff", "byte 2"), ("a\ud800", "character 1"), (b"\xed\xa0\x80", "byte 0")]
)
def test_what_is_not_utf8_is_refused(text: str | bytes, place: str) -> None:
    """tiktoken and sentencepiece would replace it in silence."""
    with pytest.raises(DataError, match=f"is not UTF-8 at {place}"):
        as_text(text)
