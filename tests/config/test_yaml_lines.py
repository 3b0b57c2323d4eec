"""The line of each key, as an editor counts."""

from __future__ import annotations

from engine.config.yaml_lines import yaml_lines, yaml_texts

TEXT = """\
# a comment
context: 2K

run:
  steps: 3  # another
  seed: 4
defaults:
  - a
  # between
  - override /b: c
list: [1,
  2]
"""


def test_lines_of_keys_and_items() -> None:
    lines = {"context": 2, "run": 4, "run.steps": 5, "run.seed": 6, "defaults": 7, "defaults.0": 8, "defaults.1": 10}
    assert yaml_lines(TEXT) == {**lines, "list": 11, "list.0": 11, "list.1": 12}


def test_texts_of_values_are_as_written() -> None:
    assert yaml_texts("a: 1e3\nb: {c: 'x', d: [2.0, 3]}\ne:\n") == {
        **{"a": "1e3", "b.c": "x", "b.d.0": "2.0", "b.d.1": "3"},
        "e": "",
    }


def test_nothing_has_no_lines() -> None:
    assert yaml_lines("") == yaml_lines("# only this") == yaml_texts("") == {}


def test_an_alias_that_contains_itself_ends() -> None:
    assert yaml_lines("a: &x\n  b: *x\n") == {"a": 1, "a.b": 2}
