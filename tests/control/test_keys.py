"""Keys that ranks share answer as a store of PyTorch does, and wait until all are set."""

from __future__ import annotations

from typing import Any

import pytest

from engine.control.keys import Keys


def ask(keys: Keys[str], member: str, ticket: int, question: str, *arguments: Any) -> list[tuple[str, int, Any]]:
    return list(keys.ask(member, ticket, question, *arguments))


def test_a_get_is_answered_when_all_of_its_keys_are_set() -> None:
    keys = Keys[str]()
    assert ask(keys, "a", 1, "get", ["x", "y"]) == [] == ask(keys, "b", 1, "get", ["y"])
    assert ask(keys, "c", 7, "set", "x", "1") == [("c", 7, None)]
    answers = ask(keys, "c", 8, "set", "y", "2")
    assert answers == [("c", 8, None), ("a", 1, ["1", "2"]), ("b", 1, ["2"])]
    assert ask(keys, "a", 2, "get", ["y", "x"]) == [("a", 2, ["2", "1"])]
    assert ask(keys, "c", 9, "set", "y", "3") == [("c", 9, None)], "nobody is answered twice"


def test_numbers_are_added_and_wake_those_who_wait() -> None:
    keys = Keys[str]()
    ask(keys, "a", 1, "get", ["n"])
    assert ask(keys, "b", 1, "add", "n", 3) == [("b", 1, 3), ("a", 1, ["3"])]
    assert ask(keys, "b", 2, "add", "n", -1) == [("b", 2, 2)]
    assert ask(keys, "b", 3, "check", ["n"]) == [("b", 3, True)]
    deleted = [ask(keys, "b", ticket, "delete", "n") for ticket in (4, 5)]
    assert deleted == [[("b", 4, True)], [("b", 5, False)]]
    assert ask(keys, "b", 6, "check", ["n"]) == [("b", 6, False)]


@pytest.mark.parametrize(
    ("before", "expected", "after", "answer"),
    [
        (None, "", "new", "new"),
        (None, "old", None, "old"),
        ("old", "old", "new", "new"),
        ("old", "", "old", "old"),
        ("old", "x", "old", "old"),
    ],
)
def test_a_value_is_swapped_if_it_is_the_expected_one(
    before: str | None, expected: str, after: str | None, answer: str
) -> None:
    keys = Keys[str]()
    if before is not None:
        ask(keys, "a", 1, "set", "k", before)
    assert ask(keys, "a", 2, "swap", "k", expected, "new") == [("a", 2, answer)]
    assert ask(keys, "a", 3, "get", ["k"]) == ([] if after is None else [("a", 3, [after])])
