"""Rows of every format become the same documents: the known shapes, which is chosen, and what counts in the loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import schema
from engine.data.sources.formats import FORMATS
from engine.data.sources.rows import chosen_line
from engine.errors import DataError
from tests.data.sources.read import documents
from tests.data.sources.rows import ASSISTANT, FORMS, USER, as_lines, in_forms

MakeData = Callable[..., schema.Data]
ROW = dict[str, Any]
CHAT = [USER, ASSISTANT]
SHAREGPT = [{"from": "human", "value": USER["content"]}, {"from": "gpt", "value": "4"}]
SYSTEM = {"role": "system", "content": "Be brief."}


def said(*messages: tuple[str, str]) -> list[ROW]:
    return [{"role": role, "content": text} for role, text in messages]


# Of each known shape: a row, the field that is chosen for it, and its messages.
SHAPES: dict[str, tuple[ROW, str, list[ROW]]] = {
    "messages": ({"id": 1, "messages": CHAT}, "messages", CHAT),
    "sharegpt": ({"conversations": SHAREGPT, "id": "a"}, "conversations", CHAT),
    "sharegpt with a system prompt": (
        {"conversations": SHAREGPT, "system": "Be brief."},
        "conversations",
        [SYSTEM, *CHAT],
    ),
    "roles in conversations": ({"conversations": CHAT}, "conversations", CHAT),
    "alpaca": (
        {"instruction": "Add.", "input": "2 + 2", "output": "4"},
        "alpaca",
        said(("user", "Add.\n2 + 2"), ("assistant", "4")),
    ),
    "alpaca without input": (
        {"instruction": "Go.", "input": "", "output": "4", "system": "Be brief.", "history": [["a", "b"]]},
        "alpaca",
        [SYSTEM, *said(("user", "a"), ("assistant", "b"), ("user", "Go."), ("assistant", "4"))],
    ),
    "prompts that are chats": ({"prompt": [USER], "completion": [ASSISTANT]}, "prompt_completion", CHAT),
}  # fmt: skip


@FORMS
@pytest.mark.parametrize("name", SHAPES)
def test_known_shapes_are_read_without_a_field(
    name: str, form: str, write: Callable[..., None], tmp_path: Path, make_data: MakeData
) -> None:
    row, field, messages = SHAPES[name]
    write([row, row], tmp_path / "a")
    for data in (make_data(tmp_path / "a", format=form), make_data(tmp_path / "a", format=form, field=field)):
        assert [one.messages for one in documents(data)] == [messages] * 2
    blocks = FORMATS[form].blocks(make_data(tmp_path / "a", format=form))
    assert f"data.field={field}" in str(chosen_line(blocks, "text")) and chosen_line(blocks, field) is None


@FORMS
def test_a_completion_counts_and_its_prompt_does_not(
    form: str, write: Callable[..., None], tmp_path: Path, make_data: MakeData
) -> None:
    write([{"prompt": "2 + é = ", "completion": "4"}, {"prompt": "", "completion": "b"}], tmp_path / "a")
    first, second = documents(make_data(tmp_path / "a", format=form))
    assert (first.text, first.prompt) == ("2 + é = 4".encode(), len("2 + é = ".encode()))
    assert (second.text, second.prompt) == (b"b", 0)


@FORMS
def test_two_fields_of_any_names_are_a_prompt_and_its_answer(
    form: str, write: Callable[..., None], tmp_path: Path, make_data: MakeData
) -> None:
    """Unless one field has this name."""
    write([{"question": "2 + é = ", "answer": "4", "id": 7}, {"question": "a", "answer": "b", "id": 8}], tmp_path / "a")
    first, second = documents(make_data(tmp_path / "a", format=form, field="question+answer"))
    assert (first.text, first.prompt) == ("2 + é = 4".encode(), len("2 + é = ".encode()))
    assert (second.text, second.prompt) == (b"ab", 1)
    write([{"question": "a", "answer": "b", "question+answer": "c"}], tmp_path / "b")
    (found,) = documents(make_data(tmp_path / "b", format=form, field="question+answer"))
    assert (found.text, found.prompt) == (b"c", 0)
    for field in ("question+answers", "question+", "+answer"):
        with pytest.raises(DataError):
            documents(make_data(tmp_path / "a", format=form, field=field))


def test_answers_of_a_prompt_that_is_a_chat_do_not_count(tmp_path: Path, make_data: MakeData) -> None:
    as_lines([{"prompt": [*CHAT, USER], "completion": [ASSISTANT]}], tmp_path / "a")
    (found,) = documents(make_data(tmp_path / "a", format="jsonl"))
    assert found.messages == [*CHAT, USER, ASSISTANT] and found.trained == [False, False, False, True]


@FORMS
def test_a_field_that_is_named_is_used(
    form: str, write: Callable[..., None], tmp_path: Path, make_data: MakeData
) -> None:
    """Also one of a known shape: `completion` is its text alone."""
    write([{"prompt": "a", "completion": "b", "text": "c"}], tmp_path / "a")
    for field, text in {"text": b"c", "prompt": b"a", "completion": b"b"}.items():
        (found,) = documents(make_data(tmp_path / "a", format=form, field=field))
        assert (found.text, found.prompt) == (text, 0)


PREFERENCES: list[tuple[ROW, list[ROW] | bytes, int]] = [
    ({"prompt": USER["content"], "chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]}, CHAT, 0),
    ({"prompt": [USER], "chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]}, CHAT, 0),
    ({"prompt": [USER], "chosen": [ASSISTANT], "rejected": [ASSISTANT]}, CHAT, 0),
    ({"prompt": USER["content"], "chosen": [ASSISTANT], "rejected": [ASSISTANT]}, CHAT, 0),
    ({"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"}, b"2 + 2 = 4", 8),
    ({"prompt": "", "chosen": "2 + 2 = 4", "rejected": "5"}, b"2 + 2 = 4", 0),
    ({"prompt": "", "chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]}, CHAT, 0),
    ({"chosen": "Human: 2? Assistant: 2", "rejected": "5"}, b"Human: 2? Assistant: 2", 0),
]


@in_forms("row, expected, prompt", PREFERENCES, both=(0, 1, 4))
def test_chosen_answers_are_read_only_by_name(
    row: ROW,
    expected: list[ROW] | bytes,
    prompt: int,
    form: str,
    write: Callable[..., None],
    tmp_path: Path,
    make_data: MakeData,
) -> None:
    write([row], tmp_path / "a")
    (found,) = documents(make_data(tmp_path / "a", format=form, field="chosen"))
    assert (found.text if found.messages is None else found.messages, found.prompt) == (expected, prompt)
    with pytest.raises(DataError) as caught:
        documents(make_data(tmp_path / "a", format=form))
    assert "data.field=chosen" in str(caught.value.problems[0].hint)


@pytest.mark.parametrize(
    ("prompt", "chosen"),
    [
        ("What is 2", "What is 2 + 2? 4"),  # with its prompt, or an answer that repeats it
        ("hi", [USER, ASSISTANT]),  # the prompt is none of its messages
        ([SYSTEM], [USER, ASSISTANT]),
        ([SYSTEM, USER], [USER, ASSISTANT]),
        (USER["content"], [USER, ASSISTANT, USER, ASSISTANT]),  # after the first or the second?
    ],
)
def test_a_prompt_is_refused_that_may_or_may_not_be_in_the_answer(
    prompt: str | list[ROW], chosen: str | list[ROW], tmp_path: Path, make_data: MakeData
) -> None:
    as_lines([{"prompt": prompt, "chosen": chosen}], tmp_path / "a")
    with pytest.raises(DataError) as caught:
        documents(make_data(tmp_path / "a", format="jsonl", field="chosen"))
    (problem,) = caught.value.problems
    assert problem.key == f"{tmp_path}/a:1" and "'prompt'" in problem.message and "'chosen'" in str(problem.hint)


def test_only_what_follows_the_prompt_counts_in_a_chosen_chat(tmp_path: Path, make_data: MakeData) -> None:
    """The same in both forms of the prompt, and whether or not the answer repeats it."""
    asked = {"role": "user", "content": "And 3 + 3?"}
    before, answer = [USER, ASSISTANT, asked], {"role": "assistant", "content": "6"}
    rows = [(before, [answer]), (before, [*before, answer]), (asked["content"], [*before, answer])]
    as_lines([{"prompt": prompt, "chosen": chosen} for prompt, chosen in rows], tmp_path / "a")
    for found in documents(make_data(tmp_path / "a", format="jsonl", field="chosen")):
        assert (found.messages, found.trained) == ([*before, answer], [False, False, False, True])


@FORMS
def test_several_shapes_need_a_field(
    form: str, write: Callable[..., None], tmp_path: Path, make_data: MakeData
) -> None:
    write([{"messages": CHAT, "input_ids": [1, 2]}], tmp_path / "a")
    with pytest.raises(DataError) as caught:
        documents(make_data(tmp_path / "a", format=form))
    assert caught.value.problems[0].hint == "set data.field=messages or data.field=input_ids"
    (found,) = documents(make_data(tmp_path / "a", format=form, field="input_ids"))
    assert found.ids is not None and found.ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("row", "field", "place"),
    [
        ({"conversations": "Human: hi"}, "text", "text"),  # a text, which must be named
        ({"instruction": "a"}, "alpaca", "'output'"),
        ({"instruction": "a", "output": None}, "alpaca", "output"),
        ({"chosen": ["a", {"role": "assistant"}], "prompt": "a"}, "chosen", "chosen"),
        ({"instruction": ["a"], "output": "b"}, "alpaca", "instruction"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, "alpaca", "history"),
        ({"prompt": 1, "completion": "b"}, "prompt_completion", "prompt"),
        ({"prompt": "a", "completion": "\ud800"}, "prompt_completion", "surrogate"),
        ({"conversations": [{"from": "Bob", "value": "a"}]}, "conversations", "'Bob'"),
    ],
)
def test_what_is_not_of_its_shape_is_refused(
    row: ROW, field: str, place: str, tmp_path: Path, make_data: MakeData
) -> None:
    as_lines([row], tmp_path / "a")
    with pytest.raises(DataError) as caught:
        documents(make_data(tmp_path / "a", format="jsonl", field=field))
    (problem,) = caught.value.problems
    assert place in problem.message and problem.key == f"{tmp_path}/a:1" and problem.hint


def test_the_first_row_of_all_files_chooses(tmp_path: Path, make_data: MakeData) -> None:
    (tmp_path / "a").write_text("\n \n")
    as_lines([{"messages": CHAT}], tmp_path / "b")
    as_lines([{"conversations": SHAREGPT}], tmp_path / "c")
    with pytest.raises(DataError) as caught:
        documents(make_data(tmp_path, format="jsonl"))
    assert caught.value.problems[0].key == f"{tmp_path}/c:1"
