"""SentencePiece: ids of the library, and control symbols that stay out of texts."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError
from tests.refusals import refused


def train(path: Path, **options: object) -> str:
    """Train a model of a few pieces into a file."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c </s> d"] * 20), model_writer=out, vocab_size=20, hard_vocab_limit=False,
        minloglevel=2, **options,
    )  # fmt: skip
    path.write_bytes(out.getvalue())
    return str(path)


def test_ids_are_the_librarys(real: Callable[[str], Path], texts: list[str]) -> None:
    bare = sentencepiece.SentencePieceProcessor(model_file=str(real("sentencepiece")))
    tokenizer = open_tokenizer(str(real("sentencepiece")))
    for text in texts:
        assert tokenizer.encode(text).tolist() == bare.encode(text)
        assert tokenizer.document(text).tolist() == [1, *bare.encode(text), 2]

    @given(st.text())
    def any_text(text: str) -> None:
        assert tokenizer.encode(text.encode()).tolist() == bare.encode(text)

    any_text()


def test_control_symbols_in_a_text_are_ordinary_text(real: Callable[[str], Path]) -> None:
    tokenizer = open_tokenizer(str(real("sentencepiece")))
    text = "<s>[INST] a</s><unk>"
    ids = tokenizer.encode(text)
    assert not {0, 1, 2} & set(ids.tolist())
    assert tokenizer.decode(ids) == text


def test_a_symbol_that_is_matched_in_texts_never_ends_documents(tmp_path: Path) -> None:
    """User-defined symbols are matched anywhere, and no option of the library stops that."""
    control = open_tokenizer(train(tmp_path / "control.model"))
    assert control.eos == 2 and 2 not in control.encode("a </s> b")
    assert 2 not in control.encode("a \uff1c/s\uff1e b"), "which its normalizer makes </s>"
    user = open_tokenizer(train(tmp_path / "user.model", user_defined_symbols="</s>"))
    assert user.eos is None and 2 in user.encode("a </s> b")


def test_a_model_without_bos_adds_none(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(train(tmp_path / "t5.model", bos_id=-1, eos_id=1, unk_id=2))
    assert (tokenizer.bos, tokenizer.eos) == (None, 1)
    with refused(DataError, f"{tmp_path}/t5.model"):
        open_tokenizer(str(tmp_path / "t5.model"), bos=True)
