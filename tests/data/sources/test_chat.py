"""Chats of every format: the same messages, and a clear refusal of what is no chat."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import schema
from engine.data.sources.chat import chat_document
from engine.errors import DataError
from tests.data.sources.read import documents
from tests.data.sources.rows import ASSISTANT, USER, as_arrow, as_lines, as_parquet, as_parquet_strings, as_strings
from tests.refusals import refused

MakeData = Callable[..., schema.Data]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "sum", "arguments": {"a": 2, "b": 2}}}]}
TOOL = {"type": "function", "function": {"name": "sum"}}
CHATS: list[dict[str, Any]] = [
    {"messages": [USER, ASSISTANT]},
    {"messages": [USER, CALL, {"role": "tool", "content": "4"}, ASSISTANT], "tools": [TOOL]},
    {"messages": [{"role": "system", "content": "Be brief."}, USER, ASSISTANT]},
]


WRITERS = {
    "lines": ("jsonl", as_lines),
    "strings": ("jsonl", as_strings),
    "parquet": ("parquet", as_parquet),
    "parquet strings": ("parquet", as_parquet_strings),
    "arrow": ("arrow", as_arrow),
}
ALL = pytest.mark.parametrize("name", WRITERS)


@ALL
def test_chats_are_read_from_every_format(name: str, tmp_path: Path, make_data: MakeData) -> None:
    form, write = WRITERS[name]
    write(CHATS, tmp_path / "a")
    found = documents(make_data(tmp_path / "a", format=form, field="messages"))
    assert [(one.messages, one.tools) for one in found] == [(row["messages"], row.get("tools")) for row in CHATS]
    assert all(one.text is one.ids is one.problem is None for one in found)


@ALL
def test_an_empty_chat_is_an_empty_document(name: str, tmp_path: Path, make_data: MakeData) -> None:
    form, write = WRITERS[name]
    write([CHATS[0], {"messages": []}], tmp_path / "a")
    _, empty = documents(make_data(tmp_path / "a", format=form, field="messages"))
    assert empty.messages is None and not empty.text and (empty.ids is None or not len(empty.ids))


def test_text_parts_are_joined_and_keys_without_a_value_left_out() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]
    chat = [{"role": "user", "content": parts, "name": None}, ASSISTANT]
    assert chat_document("a", chat, None, "messages").messages == [USER, ASSISTANT]


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([USER], "'chat'"),
        ([ASSISTANT, {"from": "human", "value": "hi"}], "chat[1] has no 'role'"),
        ([{"role": None, "content": "hi"}, ASSISTANT], "chat[0] has no 'role'"),
        ([{"role": 3, "content": "hi"}, ASSISTANT], "chat[0] has no 'role'"),
        ([{"role": "user"}, ASSISTANT], "chat[0] has a 'content'"),
        ([{"role": "user", "content": 7}, ASSISTANT], "chat[0] has a 'content'"),
        ([{"role": "user", "content": ["hi"]}, ASSISTANT], "chat[0] has a 'content'"),
        ([{"role": "user", "content": [{"type": "image", "text": "x"}]}, ASSISTANT], "chat[0] has a 'content'"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}, ASSISTANT], "chat[0] has a 'content'"),
        ([USER, "hi"], "'chat'"),
        ({"role": "user"}, "'chat'"),
        ("hello", "'chat'"),
        ('"hello"', "'chat'"),
    ],
)  # fmt: skip
def test_what_is_no_chat_is_refused(messages: object, part: str) -> None:
    with refused(DataError, "place") as problems:
        chat_document("place", messages, None, "chat")
    assert problems[0].message.startswith(part)


def test_tools_that_are_no_list_are_refused() -> None:
    with refused(DataError, "place") as problems:
        chat_document("place", [USER, ASSISTANT], '{"name": "sum"}', "messages")
    assert "'tools'" in problems[0].message


@pytest.mark.parametrize("name", ["lines", "parquet", "arrow"])
def test_a_mask_beside_a_chat_is_refused(name: str, tmp_path: Path, make_data: MakeData) -> None:
    form, write = WRITERS[name]
    write([{**CHATS[0], "loss_mask": [1]}], tmp_path / "a")
    with refused(DataError) as problems:
        documents(make_data(tmp_path / "a", format=form, field="messages"))
    assert "'loss_mask'" in problems[0].message and "'messages'" in problems[0].message


def test_a_string_in_another_field_is_a_text(tmp_path: Path, make_data: MakeData) -> None:
    """A file of JSON in a corpus of code must not become a chat."""
    text = json.dumps(CHATS[0]["messages"])
    as_lines([{"text": text}], tmp_path / "a")
    (found,) = documents(make_data(tmp_path / "a", format="jsonl"))
    assert found.text == text.encode() and found.messages is None


@pytest.mark.parametrize("flag", ["weight", "train", "trainable", "loss_mask"])
@pytest.mark.parametrize(("off", "on"), [(0, 1), (False, True), (0.0, 1.0)])
def test_flags_of_messages_say_which_are_trained_on(flag: str, off: object, on: object) -> None:
    chat = [{**USER, flag: off}, {**ASSISTANT, flag: off}, USER, {**ASSISTANT, flag: on}, USER, ASSISTANT]
    found = chat_document("a", chat, None, "messages")
    assert found.messages == [USER, ASSISTANT] * 3 and found.trained == [False, False, False, True, False, True]
    assert chat_document("a", [USER, ASSISTANT], None, "messages").trained is None


@pytest.mark.parametrize(
    ("message", "values"),
    [
        ({**ASSISTANT, "weight": 0.5}, ["weight", "0.5"]),
        ({**ASSISTANT, "train": "yes"}, ["train", '"yes"']),
        ({**ASSISTANT, "loss_mask": [1]}, ["loss_mask", "[1]"]),
        ({**ASSISTANT, "weight": 1, "train": False}, ["weight", "train"]),
        ({**USER, "trainable": True}, ["trainable", "user"]),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(message: dict[str, Any], values: list[str]) -> None:
    with refused(DataError, "place") as problems:
        chat_document("place", [USER, message, ASSISTANT], None, "chat")
    assert [value for value in ("chat[1]", *values) if value not in problems[0].message] == []


@pytest.mark.parametrize("role", ["gpt", "model", "Assistant", "ASSISTANT", "bot", "chatgpt", "answerer"])
def test_a_chat_without_an_assistant_says_which_role_to_write(role: str) -> None:
    for asks in ("user", "human"):
        with pytest.raises(DataError) as caught:
            chat_document("a", [{"role": asks, "content": "hi"}, {"role": role, "content": "yo"}], None, "messages")
        hint = str(caught.value.problems[0].hint)
        assert f"write the role assistant for {role!r}" in hint and ("user for 'human'" in hint) == (asks == "human")
    with pytest.raises(DataError) as caught:
        chat_document("a", [USER], None, "messages")
    assert str(caught.value.problems[0].hint).startswith("remove the document")


def test_from_and_value_in_messages_are_named() -> None:
    with pytest.raises(DataError) as caught:
        chat_document("a", [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], None, "messages")
    assert all(word in str(caught.value.problems[0].hint) for word in ('"from"', '"role"', "conversations"))
