"""Refusals: errors that name the place of a mistake in one sentence and say how to go on.

Tests assert the kind of an error and its place. What it says is in the catalogue of mistakes, tests/mistakes/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.errors import BytescaleError, Problem

MOST = 300  # characters of a message; of absolute paths, which are longer in tests, none counts


@contextmanager
def refused(
    kind: type[BytescaleError], *keys: str | Path | None, hint: bool = True, **fields: object
) -> Iterator[list[Problem]]:
    """Assert that the block raises exactly an error of `kind` whose problems have these keys, in this order.

    A key that begins with `...` is the end of the place: "...a.jsonl:3". Without keys there is one problem anywhere.
    Each problem must be one sentence on one line; unless `hint` is false, it must say how to go on. Further `fields`
    are values of attributes of the error.
    Yields the list of problems, which is filled when the block ends.
    """
    problems: list[Problem] = []
    with pytest.raises(kind) as caught:
        yield problems
    assert type(caught.value) is kind
    assert {name: getattr(caught.value, name) for name in fields} == fields, caught.value
    problems += caught.value.problems
    places = [problem.key for problem in problems]
    if keys:
        wanted = [key if key is None else str(key) for key in keys]
        assert len(places) == len(wanted), places
        for place, key in zip(places, wanted, strict=True):
            if key is not None and key.startswith("..."):
                assert place is not None and place.endswith(key[3:]), places
            else:
                assert place == key, places
    else:
        assert len(places) == 1, places
    for problem in problems:
        assert problem.message and "\n" not in problem.message, problem.message
        assert len(re.sub(r"/\S+", "", problem.message)) <= MOST, problem.message
        assert problem.hint or not hint, f"no way out: {problem.message}"
