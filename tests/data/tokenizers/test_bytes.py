from __future__ import annotations

from engine.data import tokenizer as earlier
from engine.data.tokenizers.load import open_tokenizer


def test_documents_are_those_of_the_earlier_byte_tokenizer() -> None:
    """Runs and caches that began with it must go on."""
    tokenizer = open_tokenizer("bytes")
    for text in (b"", "aé".encode(), bytes(range(256))):
        assert tokenizer.document(text).tolist() == earlier.encode(text).tolist()
    assert (tokenizer.bos, tokenizer.eos, tokenizer.vocabulary) == (earlier.BOS, earlier.EOS, earlier.VOCAB)


def test_texts_are_shown_without_bos_and_eos() -> None:
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.document("aé")) == "aé"
    assert tokenizer.decode(tokenizer.document(b"a\xff")) == "a\ufffd"
