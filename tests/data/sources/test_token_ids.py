"""Masks beside token ids: all that say that an id does not count are followed, whatever wrote them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import schema
from engine.errors import DataError
from tests.data.sources.read import documents
from tests.data.sources.rows import as_lines, in_forms

MakeData = Callable[..., schema.Data]
IDS = [5, 6, 7, 8]
OF_ONES = ["loss_mask", "assistant_masks", "assistant_mask", "completion_mask", "completion_masks"]
# What is beside the ids, those that are kept, and which of them count.
GOOD: list[tuple[dict[str, Any], list[int], list[bool] | None]] = [
    *(({name: [0, 0, 1, 1]}, IDS, [False, False, True, True]) for name in OF_ONES),
    *(({name: [False, False, True, True]}, IDS, [False, False, True, True]) for name in OF_ONES),
    ({"labels": [-100, -100, 7, 8]}, IDS, [False, False, True, True]),
    ({"labels": IDS}, IDS, [True] * 4),
    ({"attention_mask": [1, 1, 1, 1]}, IDS, None),
    ({"attention_mask": [1, 1, 0, 0]}, IDS[:2], None),
    ({"attention_mask": [0, 1, 1, 0]}, IDS[1:3], None),
    ({"attention_mask": [0, 0, 0, 0]}, [], None),
    ({"attention_mask": [0, 1, 1, 1], "labels": [-100, -100, 7, 8]}, IDS[1:], [False, True, True]),
    ({"labels": [-100, 6, 7, 8], "loss_mask": [1, 1, 1, 0]}, IDS, [False, True, True, False]),
    ({"labels": None, "token_type_ids": [0, 0, 0, 0], "position_ids": [0, 1, 2, 3]}, IDS, None),
]  # fmt: skip


@in_forms("beside, ids, counted", GOOD, both=(0, 5, 10, 12))  # of numbers, booleans, labels; ids left out
def test_masks_are_followed(
    beside: dict[str, Any],
    ids: list[int],
    counted: list[bool] | None,
    form: str,
    write: Callable[..., None],
    tmp_path: Path,
    make_data: MakeData,
) -> None:
    write([{"input_ids": IDS, **beside}], tmp_path / "a")
    (found,) = documents(make_data(tmp_path / "a", format=form, field="input_ids"))
    assert found.ids is not None and found.ids.tolist() == ids
    assert (None if found.mask is None else found.mask.tolist()) == counted


@in_forms(
    "beside",
    [
        {"labels": [6, 7, 8, -100]},  # those of the next tokens
        {"labels": [-100, -100, 7]},
        {"labels": [1.5, 2.0, 3.0, 4.0]},
        {"attention_mask": [1, 0, 1, 1]},
        {"attention_mask": [1, 1, 2, 2]},  # numbers of packed documents
        {"completion_mask": [0, 1]},
        {"assistant_masks": [0, 0, 0, 2]},
        {"labels": 1},  # a class
    ],
    both=(0, 2, 7),
)
def test_masks_that_cannot_be_followed_are_refused(
    beside: dict[str, Any], form: str, write: Callable[..., None], tmp_path: Path, make_data: MakeData
) -> None:
    write([{"input_ids": IDS, **beside}], tmp_path / "a")
    with pytest.raises(DataError) as caught:
        documents(make_data(tmp_path / "a", format=form, field="input_ids"))
    (problem,) = caught.value.problems
    assert repr(next(iter(beside))) in problem.message and str(problem.key).startswith(f"{tmp_path}/a") and problem.hint


def test_padding_may_have_any_id(tmp_path: Path, make_data: MakeData) -> None:
    as_lines([{"input_ids": [5, 6, -1], "attention_mask": [1, 1, 0]}], tmp_path / "a")
    (found,) = documents(make_data(tmp_path / "a", format="jsonl"))  # the only known shape
    assert found.ids is not None and found.ids.tolist() == [5, 6]
