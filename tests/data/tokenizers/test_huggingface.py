"""tokenizer.json: ids of the library, BOS and EOS by the files, and special tokens that stay out of texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, processors

from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError
from tests.refusals import refused

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}


def write(folder: Path, config: dict[str, Any] | None = None, template: bool = False) -> str:
    """Write a word-level tokenizer of WORDS, with a post-processor that adds <s> if `template`."""
    model = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<unk>", "<s>", "</s>"])
    model.add_tokens([AddedToken("<think>", special=False)])
    model.enable_truncation(2)
    model.enable_padding(length=4)
    if template:
        model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    model.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.long
def test_ids_are_the_librarys(real: Callable[[str], Path], texts: list[str]) -> None:
    bare = tokenizers.Tokenizer.from_file(str(real("huggingface")))
    tokenizer = open_tokenizer(str(real("huggingface")))
    for text in texts:
        assert tokenizer.encode(text).tolist() == bare.encode(text, add_special_tokens=False).ids

    @given(st.text())
    def any_text(text: str) -> None:
        assert tokenizer.encode(text.encode()).tolist() == bare.encode(text, add_special_tokens=False).ids

    any_text()


def test_special_tokens_in_a_text_are_ordinary_text(real: Callable[[str], Path]) -> None:
    tokenizer = open_tokenizer(str(real("huggingface")))
    ids = tokenizer.encode("<EOT>a<META>")
    assert not {0, 1} & set(ids.tolist())
    assert tokenizer.decode(ids) == "<EOT>a<META>"
    assert tokenizer.decode([0]) == "<EOT>"


def test_a_special_token_that_the_model_itself_makes_is_refused(tmp_path: Path) -> None:
    """`encode_special_tokens` does not reach the model's vocabulary: a document could end in its middle."""
    tokenizer = open_tokenizer(write(tmp_path, {"eos_token": "</s>"}))
    with refused(DataError) as problems:
        tokenizer.encode("a </s> b")
    assert "'</s>'" in problems[0].message
    assert tokenizer.encode("a c </s>b").tolist() == [3, 0, 0]  # <unk> is what the library says of unknown words


def test_added_tokens_that_are_not_special_are_vocabulary(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write(tmp_path))
    assert tokenizer.encode("a<think>b").tolist() == [3, 5, 4]
    assert tokenizer.vocabulary == 6


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    assert open_tokenizer(write(tmp_path)).encode("a b a b a").tolist() == [3, 4, 3, 4, 3]


@pytest.mark.parametrize(
    ("config", "template", "document"),
    [
        (None, False, [3]),
        (None, True, [1, 3]),
        ({"eos_token": "</s>"}, True, [1, 3, 2]),
        ({"eos_token": {"content": "</s>"}, "bos_token": "<s>"}, False, [3, 2]),
        ({"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": True}, False, [1, 3, 2]),
        ({"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": False, "add_eos_token": False}, True, [3, 2]),
        ({"eos_token": None, "bos_token": None, "add_bos_token": None}, True, [1, 3]),
    ],
)
def test_the_files_say_what_documents_start_and_end_with(
    config: dict[str, Any] | None, template: bool, document: list[int], tmp_path: Path
) -> None:
    path = write(tmp_path, config, template)
    assert open_tokenizer(path).document("a").tolist() == document
    assert open_tokenizer(f"{path}/tokenizer.json").document("a").tolist() == document


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"eos_token": "<eos>"}', "names '<eos>' as its eos_token"),
        ("{", "is not JSON"),
        ("[]", "not a JSON object"),
    ],
)
def test_a_config_that_does_not_suit_is_refused(config: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(DataError, match=message):
        open_tokenizer(path)


def test_a_random_tokenizer_is_refused(tmp_path: Path) -> None:
    tokenizers.Tokenizer(models.BPE({"a": 0}, [], dropout=0.1)).save(str(tmp_path / "tokenizer.json"))
    with refused(DataError, f"{tmp_path}/tokenizer.json"):
        open_tokenizer(str(tmp_path))
