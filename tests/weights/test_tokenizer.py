"""An exported folder has the tokenizer of the run, and weights are not trained on the tokens of another one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import processors
from transformers import AutoTokenizer

from engine.config.load import load
from engine.config.schema import Data
from engine.data.pack import pack
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import ConfigError, DataError
from engine.weights.tokenizer import check_tokenizer, copy_tokenizer, difference
from tests.data.token_files import written
from tests.data.tokenizers.chat_folder import CHATML, LLAMA3, chat_folder
from tests.data.tokenizers.real_files import real_file
from tests.refusals import refused

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def data_of(tokenizer: Path | str, *more: str) -> Data:
    return load([f"data.tokenizer={tokenizer}", *more]).data


def test_all_files_of_a_tokenizer_are_copied(tmp_path: Path) -> None:
    """transformers then encodes texts and chats as before."""
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": LLAMA3}]
    folder, copy = chat_folder(tmp_path / "theirs", named), tmp_path / "copy"
    copy.mkdir()
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)  # in files of their own
    (folder / "special_tokens_map.json").write_text('{"pad_token": "</s>"}')
    (folder / "model.safetensors").write_bytes(b"x")
    copied = copy_tokenizer(str(folder), copy)
    expected = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
    assert set(copied) == {*expected, "additional_chat_templates/tool_use.jinja"}
    assert {path.name for path in copy.iterdir()} == {*expected, "additional_chat_templates"}
    for name in copied:
        assert (copy / name).read_bytes() == (folder / name).read_bytes()
    before, after = (AutoTokenizer.from_pretrained(one) for one in (folder, copy))
    assert after("a <s> b")["input_ids"] == before("a <s> b")["input_ids"]
    assert after.apply_chat_template(CHAT)["input_ids"] == before.apply_chat_template(CHAT)["input_ids"]
    assert after.get_chat_template(tools=[{}]) == LLAMA3


def test_a_file_with_a_name_of_its_own_gets_the_usual_one(tmp_path: Path) -> None:
    """Other tokenizers in its folder stay where they are."""
    folder, copy = chat_folder(tmp_path / "theirs", None), tmp_path / "copy"
    copy.mkdir()
    (folder / "mine.json").write_bytes(content := (folder / "tokenizer.json").read_bytes())
    (folder / "tokenizer.json").write_bytes(b"other")
    (folder / "tokenizer.model").write_bytes(b"other")
    assert set(copy_tokenizer(str(folder / "mine.json"), copy)) == {"tokenizer.json", "tokenizer_config.json"}
    assert (copy / "tokenizer.json").read_bytes() == content
    (folder / "v3.model").write_bytes(b"protobuf")
    assert "tokenizer.model" in copy_tokenizer(str(folder / "v3.model"), copy)
    assert (copy / "tokenizer.model").read_bytes() == b"protobuf"


def test_bytes_have_no_files_and_missing_ones_are_named(tmp_path: Path) -> None:
    assert copy_tokenizer("bytes", tmp_path) == []
    for missing in ("none", str(tmp_path)):
        with pytest.raises(DataError, match="no such tokenizer"):
            copy_tokenizer(missing, tmp_path)


def test_weights_with_the_tokenizer_of_the_data_are_accepted(tmp_path: Path) -> None:
    folder, weights = chat_folder(tmp_path / "a", CHATML), tmp_path / "weights"
    weights.mkdir()
    check_tokenizer(weights, data_of("bytes"))  # without one
    copy_tokenizer(str(folder), weights)
    check_tokenizer(weights, data_of(folder))
    check_tokenizer(weights, data_of(weights))
    # The same vocabulary, saved by another version, with another chat template and a BOS of its own.
    library = Library.from_file(str(weights / "tokenizer.json"))
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    library.add_special_tokens(["<|more|>"])
    library.save(str(weights / "tokenizer.json"), pretty=False)
    (weights / "chat_template.jinja").write_text(LLAMA3)
    check_tokenizer(weights, data_of(folder))


@pytest.mark.parametrize("other", ["bytes", "larger"])
def test_weights_with_another_tokenizer_are_refused(other: str, tmp_path: Path) -> None:
    """Every id has an embedding, so training would go on, on nonsense."""
    weights = chat_folder(tmp_path / "weights", None)
    ours = other if other == "bytes" else str(chat_folder(tmp_path / "larger", None, size=700))
    with refused(ConfigError, f"data.tokenizer={ours}") as problems:
        check_tokenizer(weights, data_of(ours))
    (problem,) = problems
    assert f"run.weights={weights}" in problem.message
    assert f"set data.tokenizer={weights}" in str(problem.hint) and "remove tokenizer.json" in str(problem.hint)


def test_the_tokenizer_of_a_token_file_is_compared(tmp_path: Path) -> None:
    """`data.tokenizer` is not needed to read it, so it may be any."""
    weights, other = chat_folder(tmp_path / "weights", None), chat_folder(tmp_path / "other", None, size=700)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a text"}) + "\n")
    for name, tokenizer in (("good", weights), ("bad", other)):
        pack(data_of(tokenizer, "data=jsonl", f"data.path={tmp_path}/a.jsonl"), tmp_path / name)
    check_tokenizer(weights, data_of("bytes", "data=tokens", f"data.path={tmp_path}/good"))
    check_tokenizer(weights, data_of(weights, "data=tokens", f"data.path={tmp_path}/good"))
    for named, message in (("bytes", "did not make the tokens of"), (weights, "did not make"), (other, "is not the")):
        with pytest.raises(ConfigError, match=message):
            check_tokenizer(weights, data_of(named, "data=tokens", f"data.path={tmp_path}/bad"))
    two = f"data.sources={{a: {{path: {tmp_path}/good}}, b: {{path: {tmp_path}/bad}}}}"
    with refused(ConfigError, "data.tokenizer=bytes"):
        check_tokenizer(weights, data_of("bytes", "data=tokens", two, "data.mix={a: 1, b: 1}"))
    theirs = data_of("bytes", "data=tokens", f"data.path={written(tmp_path / 'megatron', [[1, 2]])}")
    check_tokenizer(weights, theirs)  # another tool made it, with a tokenizer that is not known


@pytest.mark.long
def test_real_tokenizers_differ_from_each_other() -> None:
    """And not from themselves."""
    names = ("llama3", "tekken", "sentencepiece", "huggingface")
    files = [real_file(name) for name in names]
    if any(isinstance(file, str) for file in files):
        assert "CI" not in os.environ, files
        pytest.skip("the files cannot be downloaded")
    opened = [open_tokenizer(str(file)) for file in files]
    for ours in opened:
        assert [difference(ours, theirs) is None for theirs in opened] == [ours is theirs for theirs in opened]
