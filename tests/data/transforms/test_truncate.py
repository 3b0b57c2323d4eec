from __future__ import annotations

from engine.data.tokenizers.load import open_tokenizer
from engine.data.transforms.truncate import Truncate, truncate
from tests.data.transforms.pieces import of_ids, of_text


def test_the_first_inputs_and_the_label_of_the_last_are_kept() -> None:
    whole = open_tokenizer("bytes").document(b"abcdef").tolist()
    for most in range(1, 7):
        (found,) = truncate(of_text(b"abcdef"), Truncate(tokens=most))
        ids, mask = found.encoded
        assert found.inputs == most and ids.tolist() == whole[: most + 1] and mask is None
        assert found.document.place == "a.txt" and found.content == ids.astype("<i8").tobytes()


def test_a_document_that_fits_stays_as_it_is() -> None:
    piece = of_text(b"abcdef")
    assert truncate(piece, Truncate(tokens=7)) == [piece]


def test_the_mask_is_cut_too() -> None:
    (found,) = truncate(of_ids(1, 2, 3, 4, mask=[False, False, True, False]), Truncate(tokens=2))
    ids, mask = found.encoded
    assert mask is not None and (ids.tolist(), mask.tolist()) == ([1, 2, 3], [False, False, True])
