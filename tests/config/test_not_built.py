"""Values that are not supported yet are refused by name, all at once."""

from __future__ import annotations

import pytest

from engine.config.not_built import not_built


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        ("data.runtime", "ray", True),
        ("data.runtime", "rya", False),
        ("data.format", "ray", False),
    ],
)
def test_a_mistake_is_not_taken_for_a_value_to_come(key: str, value: object, refused: bool) -> None:
    problem = not_built(key, value, "local")
    assert (problem is not None) is refused
    assert problem is None or problem.message == f"{value} is not implemented yet"
