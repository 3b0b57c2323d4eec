from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.transforms.split import Split, split
from engine.errors import DataError
from tests.data.transforms.pieces import of_ids, of_text
from tests.refusals import refused

paragraphs_ = st.lists(st.sampled_from(["a", "bb\nb", "ccccc", " ", "\t", "", "\r"]), max_size=12).map("\n\n".join)


def texts(text: bytes, tokens: int) -> list[bytes]:
    return [piece.document.text or b"" for piece in split(of_text(text), Split(tokens=tokens))]


@pytest.mark.parametrize(
    ("text", "tokens", "pieces"),
    [
        (b"aa\n\nbb\n\ncc", 10, [b"aa\n\nbb\n\ncc"]),
        (b"aa\n\nbb\n\ncc", 9, [b"aa\n\nbb\n\n", b"cc"]),
        (b"aa\n\nbb\n\ncc", 8, [b"aa\n\nbb\n\n", b"cc"]),
        (b"aa\n\nbb\n\ncc", 7, [b"aa\n\n", b"bb\n\ncc"]),
        (b"aaaaaaaaaa\n\nb", 3, [b"aaaaaaaaaa\n\n", b"b"]),  # a paragraph is not cut
        (b"a\nb\nc", 1, [b"a\nb\nc"]),  # lines are no paragraphs
        (b"a\r\n\r\nb", 1, [b"a\r\n\r\n", b"b"]),
        (b"a\n \t\n\n\nb", 1, [b"a\n \t\n\n\n", b"b"]),
        (b"\n\na\n\nb\n\n", 1, [b"\n\na\n\n", b"b\n\n"]),
        (b" \n\n ", 1, [b" \n\n "]),
    ],
)
def test_a_text_is_cut_between_paragraphs(text: bytes, tokens: int, pieces: list[bytes]) -> None:
    assert texts(text, tokens) == pieces


@given(paragraphs_, st.integers(1, 12))
def test_pieces_have_the_whole_text_in_order_and_are_as_long_as_allowed(text: str, tokens: int) -> None:
    found = texts(text.encode(), tokens)
    assert b"".join(found) == text.encode() and (all(found) or not text)
    for one, other in pairwise(found):
        first = len(other) - len(split(of_text(other), Split(tokens=1))[-1].document.text or b"") or len(other)
        assert one.strip() and other.strip() and len(one) + first > tokens
        assert len(one) <= tokens or len(split(of_text(one), Split(tokens=1))) == 1


def test_only_whole_texts_can_be_split() -> None:
    for piece in (of_ids(1, 2, 3), of_text(b"question\n\nanswer", prompt=10)):
        with refused(DataError, piece.document.place):
            split(piece, Split(tokens=1))


def test_time_is_linear_in_white_space() -> None:
    begun = time.process_time()
    assert len(texts(b"\n" + b" " * 300_000 + b"x" + b" \n" * 100_000 + b"y", 1)) == 2
    assert time.process_time() - begun < 5
