"""Llama 3 and Tekken: ids of the library on the whole text, and long runs of white space."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from engine.data.tokenizers.load import open_tokenizer
from engine.data.tokenizers.tiktoken import LLAMA3_PATTERN, TiktokenCodec, white_pieces
from engine.data.tokenizers.tokenizer import Tokenizer
from engine.errors import DataError
from tests.refusals import refused

pytestmark = pytest.mark.long

Encode = Callable[[str], list[int]]
SPACES = st.text(alphabet=" \t\n\r\u3000\x85ax!\u0301", max_size=40)


@pytest.fixture(scope="module")
def llama3(real: Callable[[str], Path]) -> tuple[Tokenizer, Encode]:
    """Llama 3's tokenizer, and tiktoken on its file."""
    ranks = {b64decode(token): int(rank) for token, rank in map(str.split, real("llama3").read_text().splitlines())}
    bare = tiktoken.Encoding("bare", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
    return open_tokenizer(str(real("llama3"))), bare.encode_ordinary


@pytest.fixture(scope="module")
def tekken(real: Callable[[str], Path]) -> tuple[Tokenizer, Encode]:
    """Mistral's Tekken, and tiktoken on its file: as mistral-common does it, special tokens are added to the ids."""
    data = json.loads(real("tekken").read_text(encoding="utf-8"))
    ranks = {b64decode(entry["token_bytes"]): entry["rank"] for entry in data["vocab"][: 131072 - 1000]}
    bare = tiktoken.Encoding("bare", pat_str=data["config"]["pattern"], mergeable_ranks=ranks, special_tokens={})
    return open_tokenizer(str(real("tekken"))), lambda text: [rank + 1000 for rank in bare.encode_ordinary(text)]


@pytest.mark.parametrize("name", ["llama3", "tekken"])
def test_ids_are_the_librarys(name: str, request: pytest.FixtureRequest, texts: list[str]) -> None:
    tokenizer, bare = request.getfixturevalue(name)
    for text in texts:
        assert tokenizer.encode(text).tolist() == bare(text)
        assert tokenizer.document(text).tolist() == [tokenizer.bos, *bare(text), tokenizer.eos]

    @given(st.text())
    def any_text(text: str) -> None:
        assert tokenizer.encode(text.encode()).tolist() == bare(text)

    any_text()


@pytest.mark.parametrize(
    ("name", "text"), [("llama3", "<|begin_of_text|>a<|eot_id|>"), ("tekken", "<s>a</s><SPECIAL_9>")]
)
def test_special_tokens_in_a_text_are_ordinary_text(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer, _ = request.getfixturevalue(name)
    ids = tokenizer.encode(text)
    assert max(ids) < 128000 if name == "llama3" else min(ids) >= 1000
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.document("a")) in ("<|begin_of_text|>a<|end_of_text|>", "<s>a</s>")


def test_llama3_names_its_special_tokens_as_meta_does(llama3: tuple[Tokenizer, Encode]) -> None:
    assert llama3[0].decode([128009, 128011, 128012, 128255]) == (
        "<|eot_id|><|image|><|reserved_special_token_2|><|reserved_special_token_245|>"
    )


@pytest.mark.parametrize("name", ["llama3", "tekken"])
def test_a_run_of_white_space_is_cut_without_changing_ids(name: str, request: pytest.FixtureRequest) -> None:
    """Note: [long runs of white space], with runs of 2 characters as long ones."""
    tokenizer, bare = request.getfixturevalue(name)
    codec = TiktokenCodec(tokenizer.codec._encoding, longest=2)

    @given(SPACES)
    def spaces(text: str) -> None:
        assert codec.encode(text).tolist() == bare(text)

    spaces()


@pytest.mark.parametrize(("name", "start", "end"), [("llama3", "", "\u0301"), ("tekken", "x!\n", "\ny")])
def test_tiktoken_does_not_panic_on_a_million_spaces(
    name: str, start: str, end: str, request: pytest.FixtureRequest
) -> None:
    """A panic is no Exception: it would end the process that loads the data."""
    tokenizer, _ = request.getfixturevalue(name)
    text = f"{start}{' ' * 1_000_001}{end}"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_run_that_is_long_enough_is_found() -> None:
    for before in range(12):
        text = "x" * before + " " * 6 + "y" + "\t" * 5 + "\n" + " " * 5
        assert list(white_pieces(text, 5)) == [(before, before + 5), (before + 13, before + 18)]


def test_a_tekken_pattern_that_the_note_does_not_cover_is_refused(tmp_path: Path) -> None:
    config = {"pattern": r"\s+", "default_vocab_size": 4, "default_num_special_tokens": 3}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": [{"token_bytes": "AA==", "rank": 0}]}))
    with refused(DataError, f"{tmp_path}/tekken.json"):
        open_tokenizer(str(tmp_path))
