from __future__ import annotations

from typing import Any

import pytest

from engine.errors import CheckpointError
from engine.format_number import format_number


@pytest.mark.parametrize(("values", "number"), [({}, 1), ({"format": 1}, 1), ({"format": 3}, 3)])
def test_known_formats_are_read_and_the_first_ones_have_no_number(values: dict[str, Any], number: int) -> None:
    assert format_number(values, 3, "file") == number


@pytest.mark.parametrize("found", [4, 2**70, 0, -1, 1.0, "3", True, None, [1], {"a": "b" * 1000}])
def test_other_formats_are_refused_with_the_file_and_a_way_out(found: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        format_number({"version": found}, 3, "file", CheckpointError, key="version")
    (problem,) = caught.value.problems
    assert problem.key == "file" and problem.hint and len(problem.message) < 200
    assert repr(found)[:20] in problem.message
