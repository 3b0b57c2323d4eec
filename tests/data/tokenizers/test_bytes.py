from __future__ import annotations

from engine.data.tokenizers.bytes import BOS, EOS, VOCAB
from engine.data.tokenizers.load import open_tokenizer


def test_a_document_is_bos_its_bytes_and_eos() -> None:
    bytes_ = open_tokenizer("bytes")
    for text in ("aé", "aé".encode()):
        assert bytes_.document(text).tolist() == [BOS, 97, 195, 169, EOS]
    assert open_tokenizer("bytes", bos=False).document(b"").tolist() == [EOS]


def test_any_byte_is_a_token_of_the_vocabulary() -> None:
    bytes_ = open_tokenizer("bytes")
    assert sorted(bytes_.document(bytes(range(256))).tolist()) == list(range(VOCAB))
    assert bytes_.vocabulary == VOCAB and bytes_.decode([BOS, 97, 195, 169, EOS]) == "aé"
