from __future__ import annotations

from engine.data.tokenizer import BOS, EOS, VOCAB, encode


def test_a_document_is_bos_its_bytes_and_eos() -> None:
    assert encode("aé".encode()).tolist() == [BOS, 97, 195, 169, EOS]


def test_a_part_of_a_document_has_only_its_own_ends() -> None:
    assert encode(b"a", last=False).tolist() == [BOS, 97]
    assert encode(b"a", first=False).tolist() == [97, EOS]
    assert encode(b"", first=False, last=False).tolist() == []


def test_every_token_is_in_the_vocabulary() -> None:
    assert sorted(encode(bytes(range(256))).tolist()) == list(range(VOCAB))
