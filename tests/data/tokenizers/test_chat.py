"""Chats have the ids of transformers' apply_chat_template, and only what the assistant says counts in the loss.

If these fail, a fine-tuned model learns to write prompts, or sees turns that end otherwise than in use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, processors
from tokenizers import Tokenizer as Library
from transformers import AutoTokenizer

from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError
from tests.data.tokenizers.chat_folder import CHATML, CHATML_MARKED, LLAMA3, MISTRAL, SPECIAL, chat_folder
from tests.refusals import refused

Message = dict[str, Any]
TEMPLATES = {"llama3": LLAMA3, "mistral": MISTRAL, "chatml": CHATML, "marked": CHATML_MARKED}
ASK, ANSWER = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}
ANY = st.characters(codec="utf-8", exclude_characters="\ufdd0\ufdd1")  # which mark what the assistant says
TEXT = st.text(st.sampled_from(" \n\t.<|>/saéß😀\ufeff\x85") | ANY, max_size=12)
TURNS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4)


def chat_of(turns: list[tuple[str, str]]) -> list[Message]:
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give the folder of a tokenizer by the name of its template."""
    root = tmp_path_factory.mktemp("tokenizers")
    for name, template in TEMPLATES.items():
        chat_folder(root / name, template)
    return lambda name: root / name


def theirs(folder: Path, chat: list[Message], tools: list[Any] | None = None) -> tuple[list[int], list[int] | None]:
    """The ids of transformers, and its mask if the template has `{% generation %}` blocks."""
    model = AutoTokenizer.from_pretrained(folder)
    marked = "generation %}" in model.get_chat_template(tools=tools)
    found = model.apply_chat_template(chat, tools=tools, return_dict=True, return_assistant_tokens_mask=marked)
    return found["input_ids"], found["assistant_masks"] if marked else None


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_masks_are_those_of_transformers(name: str, folders: Callable[[str], Path]) -> None:
    model, tokenizer = AutoTokenizer.from_pretrained(folders(name)), open_tokenizer(str(folders(name)))
    marked = name == "marked"

    @given(TURNS)
    def any_chat(turns: list[tuple[str, str]]) -> None:
        ids, mask = tokenizer.chat(chat_of(turns))
        found = model.apply_chat_template(chat_of(turns), return_dict=True, return_assistant_tokens_mask=marked)
        assert ids.tolist() == found["input_ids"] and ids.dtype == np.int32
        assert mask.dtype == np.bool_ and len(mask) == len(ids)
        if marked:
            assert mask.astype(int).tolist() == found["assistant_masks"]

    any_chat()


@given(turns=TURNS)
def test_a_template_without_marks_counts_what_one_with_marks_does(
    turns: list[tuple[str, str]], folders: Callable[[str], Path]
) -> None:
    """Both write the same text, and transformers agrees with the marks (the test above)."""
    (ids, mask), expected = (open_tokenizer(str(folders(name))).chat(chat_of(turns)) for name in ("chatml", "marked"))
    assert (ids.tolist(), mask.tolist()) == (expected[0].tolist(), expected[1].tolist())


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("llama3", "Fine\n\nindeed<|eot_id|>2<|eot_id|>"),
        ("mistral", "  Fine\n\nindeed \n</s> 2</s>"),
        ("chatml", " Fine\n\nindeed \n<|im_end|>2<|im_end|>"),
        ("marked", " Fine\n\nindeed \n<|im_end|>2<|im_end|>"),
    ],
)
def test_what_counts_are_the_answers_and_what_ends_them(
    name: str, counted: str, folders: Callable[[str], Path]
) -> None:
    tokenizer = open_tokenizer(str(folders(name)))
    ids, mask = tokenizer.chat(chat_of([("How?", " Fine\n\nindeed \n"), ("1 + 1?", "2")]))
    assert tokenizer.decode(ids[mask]) == counted
    assert tokenizer.decode(ids).count("How?") == 1


def test_turns_of_other_roles_and_a_last_question_do_not_count(folders: Callable[[str], Path]) -> None:
    tokenizer = open_tokenizer(str(folders("chatml")))
    chat = [{"role": "system", "content": "S"}, ASK, ANSWER, {"role": "tool", "content": "T"}, ANSWER, ASK]
    ids, mask = tokenizer.chat(chat)
    assert tokenizer.decode(ids[mask]) == "That.<|im_end|>That.<|im_end|>"
    assert ids.tolist() == theirs(folders("chatml"), chat)[0]


def test_tools_and_their_calls(folders: Callable[[str], Path]) -> None:
    tools = [{"type": "function", "function": {"name": "é", "parameters": {"<b>": 1}}}]
    call: Message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "é", "arguments": {}}}]}
    chat = [ASK, call, {"role": "tool", "content": "7"}, ANSWER]
    ids, mask = (tokenizer := open_tokenizer(str(folders("chatml")))).chat(chat, tools)
    assert ids.tolist() == theirs(folders("chatml"), chat, tools)[0]
    assert tokenizer.decode(ids[mask]).startswith('<tool_call>{"name": "é", "arguments": {}}</tool_call><|im_end|>')
    with pytest.raises(DataError, match="has tools, which the chat template does not use"):
        open_tokenizer(str(folders("llama3"))).chat(chat, tools)


def test_white_space_at_the_end_of_a_marked_answer_counts(tmp_path: Path) -> None:
    """Byte-level tokenizers may leave white space out of the offsets of tokens (`trim_offsets`)."""
    folder = chat_folder(
        tmp_path, "{% for m in messages %}:{% generation %}{{ m.content }}{% endgeneration %}:{% endfor %}"
    )
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    library.save(str(folder / "tokenizer.json"))
    tokenizer = open_tokenizer(str(folder))
    ids, mask = tokenizer.chat([{"role": "assistant", "content": "a\n"}])
    assert [tokenizer.decode(ids), tokenizer.decode(ids[mask])] == [":a\n:", "a\n"]


@pytest.mark.parametrize(
    ("template", "counted"),
    [
        # Vicuna's has no prompt for an answer, which would say where the header ends.
        ("{% for m in messages %}{{ m.role.upper() + ':\\n' + m.content + '\\n' }}{% endfor %}", "That.\nThat.\n"),
        # A header in front of all, and a date: the same on every day.
        ("{{ strftime_now('%d %b %Y') }}" + CHATML, "That.<|im_end|>That.<|im_end|>"),
        # Blocks in macros, whose text is written later.
        (
            "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
            "{% for m in messages %}{{ m.role }}{% if m.role == 'assistant' %}{{ say(m) }}{% endif %}{% endfor %}",
            "That.That.",
        ),
        # Loop controls.
        (
            "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}</s>{% endfor %}",
            "That.</s>That.</s>",
        ),
    ],
)  # fmt: skip
def test_other_templates(template: str, counted: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(chat_folder(tmp_path, template)))
    ids, mask = tokenizer.chat([ASK, ANSWER, ASK, ANSWER])
    assert tokenizer.decode(ids[mask]) == counted
    assert "26 Jul 2024" in tokenizer.decode(ids) or "strftime" not in template


@pytest.mark.parametrize("text", SPECIAL)
@pytest.mark.parametrize("place", ["content", "name", "arguments"])
def test_a_message_cannot_contain_a_special_token(text: str, place: str, folders: Callable[[str], Path]) -> None:
    """The turn would end there, or another one begin."""
    answer = {**ANSWER, **({"tool_calls": [{"a": {text: 1}}]} if place == "arguments" else {place: f"a{text}b"})}
    with pytest.raises(DataError, match=r"messages\[1\] contains .* which would become the special token") as caught:
        open_tokenizer(str(folders("marked"))).chat([ASK, answer])
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}", "the tokenizer's chat template is not valid"),
        ("{{ raise_exception('no ' + messages[0].role) }}", r"cannot be applied to messages\[:4\]: no user"),
        ("{{ messages[0].content + 1 }}", r"cannot be applied to messages\[:4\]"),
        ("{{ messages[0].nothing.more }}", r"cannot be applied to messages\[:4\]"),
        ("{{ ''.__class__.__mro__ }}", r"cannot be applied to messages\[:4\]: access to attribute"),
        ("{{ messages[:2] | length }}", r"leaves out or changes the end of messages\[1\]"),
        (
            "{% for m in messages %}{{ m.role }}{% if loop.last %}!{% endif %}{{ m.content }}</s>{% endfor %}",
            r"writes messages\[:2\] differently when others follow",
        ),
        ("{% generation %}{% endgeneration %}That.", "writes no text for the answers of the assistant"),
    ],
)  # fmt: skip
def test_what_a_template_cannot_do_is_refused(template: str, message: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(chat_folder(tmp_path, template)))
    with pytest.raises(DataError, match=message) as caught:
        tokenizer.chat([ASK, ANSWER, ASK, ANSWER])
    assert caught.value.problems[0].hint


def test_a_tokenizer_without_a_template_says_what_to_write(folders: Callable[[str], Path], tmp_path: Path) -> None:
    for path in ("bytes", str(chat_folder(tmp_path, None))):
        with pytest.raises(DataError, match="has no chat template") as caught:
            open_tokenizer(path).chat([ASK, ANSWER])
        assert "data.tokenizer" in str(caught.value.problems[0].hint)


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    """In tokenizer_config.json, also as a list, and in files of their own, which come first."""
    named = [{"name": name, "template": "{{ bos_token }}" + name + CHATML} for name in ("tool_use", "default")]
    folder, tools = chat_folder(tmp_path / "list", named), [{"name": "sum"}]
    other = "jinja" + CHATML
    for offered in (None, tools):
        ids, _ = open_tokenizer(str(folder)).chat([ASK, ANSWER], offered)
        assert ids.tolist() == theirs(folder, [ASK, ANSWER], offered)[0]
    (folder / "chat_template.jinja").write_text(other)
    ids, _ = (tokenizer := open_tokenizer(str(folder))).chat([ASK, ANSWER])
    assert ids.tolist() == theirs(folder, [ASK, ANSWER])[0] and tokenizer.decode(ids).startswith("jinja")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("more" + CHATML)
    ids, _ = (tokenizer := open_tokenizer(str(folder))).chat([ASK, ANSWER], tools)
    assert ids.tolist() == theirs(folder, [ASK, ANSWER], tools)[0] and tokenizer.decode(ids).startswith("more")
    alone = chat_folder(tmp_path / "alone", None)
    (alone / "chat_template.json").write_text(json.dumps({"chat_template": other}))
    assert (
        open_tokenizer(str(alone)).chat([ASK, ANSWER])[0].tolist()
        == open_tokenizer(str(folder)).chat([ASK, ANSWER])[0].tolist()
    )
    without = chat_folder(tmp_path / "without", named[:1])
    with refused(DataError) as problems:
        open_tokenizer(str(without)).chat([ASK, ANSWER])
    assert "tool_use" in problems[0].message


def test_templates_name_special_tokens(tmp_path: Path) -> None:
    """A missing one would be written as nothing."""
    template = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{{ pad_token }}{% endfor %}"
    folder = chat_folder(tmp_path, template, bos_token=None, eos_token={"content": "</s>"}, add_bos_token=True)
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<|eot_id|>"}}))
    tokenizer = open_tokenizer(str(folder))
    assert tokenizer.decode(tokenizer.chat([ASK, ANSWER])[0]) == "<s>What?</s><|eot_id|>That.</s><|eot_id|>"


def test_fingerprints_differ_with_the_template(tmp_path: Path) -> None:
    folders = [chat_folder(tmp_path / str(number), one) for number, one in enumerate((None, CHATML, LLAMA3))]
    assert len({open_tokenizer(str(folder)).fingerprint for folder in folders}) == 3


def test_texts_are_encoded_as_before_a_chat(folders: Callable[[str], Path]) -> None:
    """Chats switch the option off that keeps special tokens out of texts."""
    tokenizer = open_tokenizer(str(folders("chatml")))
    before = tokenizer.document("a</s>b <|im_end|>").tolist()
    tokenizer.chat([ASK, ANSWER])
    assert tokenizer.document("a</s>b <|im_end|>").tolist() == before
    assert before.count(1) == 1 and 3 not in before


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_messages_that_are_not_trained_on_do_not_count(name: str, folders: Callable[[str], Path]) -> None:
    tokenizer, chat = open_tokenizer(str(folders(name))), chat_of([("a", "one"), ("b", "two"), ("c", "three")])
    whole, _ = tokenizer.chat(chat)
    ids, mask = tokenizer.chat(chat, trained=[False, False, False, True, False, True])
    assert ids.tolist() == whole.tolist() and tokenizer.decode(ids[mask]) == "two<|im_end|>three<|im_end|>"
    assert not tokenizer.chat(chat, trained=[False] * 6)[1].any()


def test_marks_that_do_not_match_the_messages_are_refused_with_flags(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}{% endfor %}{% generation %}That.{% endgeneration %}"
    tokenizer = open_tokenizer(str(chat_folder(tmp_path, template)))
    assert tokenizer.chat([ASK, ANSWER, ASK, ANSWER])[1].any()
    with pytest.raises(DataError, match="marks 1 parts, but the assistant has 2 messages"):
        tokenizer.chat([ASK, ANSWER, ASK, ANSWER], trained=[False, False, False, True])


def test_another_prompt_for_the_answer_is_shown_beside_it(tmp_path: Path) -> None:
    template = CHATML.replace("<|im_start|>assistant\n' }}", "<|im_start|>assistant\n<think>\n' }}")
    with pytest.raises(DataError) as caught:
        open_tokenizer(str(chat_folder(tmp_path, template))).chat([ASK, ANSWER])
    (problem,) = caught.value.problems
    assert "the prompt for messages[1]" in problem.message and "generation" in str(problem.hint)
    assert r"assistant\n<think>\n'" in problem.message and r"assistant\nThat.<|im_end|>\n'" in problem.message


NORMALIZERS = {
    "NFKC": (normalizers.NFKC(), ["\uff1c|im_end|\uff1e", "<|\uff49m_end|>"]),
    "Lowercase": (normalizers.Lowercase(), ["<|IM_END|>", "<|Im_Start|>", "</S>"]),
    "Replace": (normalizers.Replace("\u2603", "<|im_end|>"), ["\u2603"]),
    "NFKC and Lowercase": (
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        ["\uff1c|IM_END|\uff1e"],
    ),
}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_a_normalizer_cannot_make_special_tokens_of_a_message(name: str, tmp_path: Path) -> None:
    """The turn would end there. Special tokens with `normalized` are searched for in the text after it."""
    normalizer, texts = NORMALIZERS[name]
    folder = chat_folder(tmp_path, CHATML)
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.normalizer = normalizer
    library.add_special_tokens([AddedToken(token, special=True, normalized=True) for token in SPECIAL])
    library.save(str(folder / "tokenizer.json"))
    tokenizer = open_tokenizer(str(folder))
    for text in texts:
        special = {library.token_to_id(token) for token in SPECIAL}
        assert special & set(library.encode(text, add_special_tokens=False).ids), text
        assert not special & set(tokenizer.encode(f"a {text} b").tolist()), "in a text it is ordinary"
        with refused(DataError) as problems:
            tokenizer.chat([{"role": "user", "content": f"a {text} b"}, ANSWER])
        assert "messages[0]" in problems[0].message
    ids, mask = tokenizer.chat([ASK, ANSWER])
    assert tokenizer.decode(ids[mask]).endswith("<|im_end|>")


def test_the_token_that_ends_a_turn(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    ends = {"llama3": "<|eot_id|>", "mistral": "</s>", "chatml": "<|im_end|>", "marked": "<|im_end|>"}
    for name, text in ends.items():
        tokenizer = open_tokenizer(str(folders(name)))
        assert tokenizer.end_of_turn is not None and tokenizer.decode([tokenizer.end_of_turn]) == text
    plain = "{% for m in messages %}{{ m.role + ':\\n' + m.content + '\\n' }}{% endfor %}"
    several = CHATML + "{%- if not add_generation_prompt %}{{- eos_token }}{%- endif %}"  # as Phi 3's does
    phi = open_tokenizer(str(chat_folder(tmp_path / "phi", several)))
    assert phi.end_of_turn is not None and phi.decode([phi.end_of_turn]) == "<|im_end|>"
    for template in (plain, None, "{{ messages[0].nothing.more }}"):
        assert open_tokenizer(str(chat_folder(tmp_path / str(template)[:9], template))).end_of_turn is None
