"""Templates and tokenizers of others that loop, call themselves, or make 10^9 of something: errors of the data."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from engine.data.tokenizers import chat
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError
from tests.data.tokenizers.chat_folder import CHATML, chat_folder
from tests.refusals import refused

CHAT = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
TEMPLATES = {
    "a long text": "{{ 'x' * 10**10 }}",
    "a text that does not fit into tokens": "{{ 'x' * 10**7 }}",
    "doubling": "{% set n = namespace(a='x') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}{{ n.a }}",
    "a long list": "{{ [0] * 10**10 }}",
    "a wide number": "{{ '%9999999999d' % 1 }}",
    "a wide format": "{{ '{0:9999999999}'.format(1) }}",
    "a wide line": "{{ 'a'|center(10**10) }}",
    "a wide method": "{{ 'a'.ljust(10**10) }}",
    "indented JSON": "{{ messages|tojson(indent=10**10) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a power": "{{ (10**(10**8)) % 7 }}",
    "a macro": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a recursive loop": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "brackets": "{{ " + "[" * 10_000 + "]" * 10_000 + " }}",
    "blocks": "{% if 1 %}" * 10_000,
    "signs": "{{ " + "-" * 10_000 + "1 }}",
    "digits": "{{ " + "9" * 10_000 + " }}",
    "an undefined name": "{{ foo.bar }}",
    "another file": "{% include '/etc/passwd' %}",
    "a syntax error": "{% for %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_does_not_end_well(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.2)
    folder = chat_folder(tmp_path / "model", TEMPLATES[name] + CHATML)
    tokenizer = open_tokenizer(str(folder))
    with pytest.raises(DataError) as caught:
        tokenizer.chat(CHAT)
    (problem,) = caught.value.problems
    assert "template" in problem.message and len(problem.message) < 600
    assert problem.hint


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_an_expression_that_backtracks_without_end_refuses_the_document(part: str, tmp_path: Path) -> None:
    """The library panics after 10 million steps. In Python a panic is no Exception, and would end the process."""
    model = tokenizers.Tokenizer(models.BPE({character: number for number, character in enumerate("axyc ")}, []))
    found = json.loads(model.to_str())
    pattern = {"pattern": {"Regex": "(x+x+)+y"}}
    of_part = {"behavior": "Isolated", "invert": False} if part == "pre_tokenizer" else {"content": "c"}
    found[part] = {"type": "Split" if part == "pre_tokenizer" else "Replace"} | pattern | of_part
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    tokenizer = open_tokenizer(str(tmp_path))
    assert len(tokenizer.encode("xxxy c"))
    for encode in (tokenizer.encode, tokenizer.document):
        with refused(DataError) as problems:
            encode("x" * 40 + "c")
        assert "leave the document out" in str(problems[0].hint)


def replaced(pairs: list[tuple[dict[str, str], str]]) -> dict[str, Any]:
    steps = [{"type": "Replace", "pattern": pattern, "content": content} for pattern, content in pairs]
    return {"type": "Sequence", "normalizers": steps, "decoders": steps}


def charsmap(text: bytes) -> str:
    return base64.b64encode(bytes(4) + text + b"\0").decode()


TOKENIZERS: dict[str, dict[str, Any]] = {
    "a chain of normalizers": {"normalizer": replaced([({"String": "a"}, "a" * 10)] * 10)},
    "a chain of expressions": {"normalizer": replaced([({"Regex": "a"}, "a" * 10)] * 10)},
    "nothing replaced": {"normalizer": replaced([({"String": ""}, "a" * 10)] * 10)},
    "a chain inside a chain": {
        "normalizer": {"type": "Sequence", "normalizers": [replaced([({"String": "a"}, "a" * 10)])] * 10}
    },
    "a chain of decoders": {"decoder": replaced([({"String": "a"}, "a" * 10)] * 10)},
    "a text in front": {"normalizer": {"type": "Prepend", "prepend": "a" * 10_000}},
    "a table": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(b"a" * 10_000)}},
    "a large id": {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 10**9}, "unk_token": "a"}},
    "an unknown model": {"model": {"type": "none"}},
    "a model of text": {"model": {"type": "WordLevel", "vocab": "abc", "unk_token": "a"}},
    "a name of a list": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": ["a"]}},
    "an expression": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}},
    "levels": {"normalizer": json.loads('{"type": "Sequence", "normalizers": [' * 200 + "]}" * 200)},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_would_fill_the_memory(name: str, tmp_path: Path) -> None:
    good = tokenizers.Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(good.to_str()) | TOKENIZERS[name]))
    with pytest.raises(DataError) as caught:
        open_tokenizer(str(file))
    (problem,) = caught.value.problems
    assert str(problem.key).startswith(str(file)) and problem.hint


TEKKEN = {"pattern": r"a+(?!b)|\s+(?!\S)|\s+", "default_vocab_size": 300, "default_num_special_tokens": 10}
VOCAB = [{"rank": rank, "token_bytes": base64.b64encode(bytes([rank])).decode()} for rank in range(256)]


@pytest.mark.parametrize(
    "config",
    [
        {"default_num_special_tokens": 10**9, "default_vocab_size": 10**9 + 256},
        {"default_num_special_tokens": 10**9},
        {"default_num_special_tokens": -1},
        {"default_num_special_tokens": "10"},
        {"default_vocab_size": 10**400},
        {"default_vocab_size": None},
        {"pattern": 3},
        {"pattern": "(" + TEKKEN["pattern"]},  # type: ignore[operator]
    ],
    ids=str,
)
def test_a_tekken_file_with_other_numbers(config: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "tekken.json"
    file.write_text(json.dumps({"config": TEKKEN | config, "vocab": VOCAB}))
    with pytest.raises(DataError) as caught:
        open_tokenizer(str(file))
    assert str(caught.value.problems[0].key).startswith(str(file))


@pytest.mark.parametrize("value", [3, [], {}, {"content": 3}, ["<s>"]], ids=str)
@pytest.mark.parametrize("key", ["bos_token", "eos_token", "chat_template"])
def test_values_of_another_type_in_tokenizer_config(key: str, value: object, tmp_path: Path) -> None:
    """They name no token or template: that is an error, or they are left out."""
    folder = chat_folder(tmp_path / "model", None, **{key: value})
    try:
        open_tokenizer(str(folder))
    except DataError as error:
        assert str(error.problems[0].key).startswith(str(folder))
