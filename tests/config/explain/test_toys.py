"""Defaults that only serve to try commands out are named with what replaces them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.explain.toys import Part, toys
from engine.config.load import load

ALL: tuple[Part, ...] = ("model", "documents", "lengths", "rates")


def test_the_quickstart_is_made_of_toys() -> None:
    said = toys(load([]), *ALL)
    assert said is not None and len(said.splitlines()) == 1
    for way in ("recipe=NAME", "(data.path=FILE", "lengths=github", "profile-hardware"):
        assert way in said
    assert toys(load([]), "model") == "placeholder defaults: model=tiny (recipe=NAME; `bytescale recipes list`)"


@pytest.mark.parametrize(
    ("overrides", "left"),
    [
        (["recipe=llama7b-2m"], {"documents", "rates"}),
        (["recipe=llama7b-2m", "data=jsonl", "data.path=a.jsonl"], {"rates"}),
        (["data=folder", "data.path=a"], {"model", "rates"}),
        (["lengths=github"], {"model", "documents", "rates"}),
        (["cluster.calibration=mine.json"], {"model", "documents", "lengths"}),
    ],
)
def test_what_is_ones_own_is_not_named(overrides: list[str], left: set[Part], tmp_path: Path) -> None:
    config = load(overrides)
    assert {part for part in ALL if toys(config, part)} == left
