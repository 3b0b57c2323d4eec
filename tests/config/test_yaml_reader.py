"""YAML: the line of each key, as an editor counts, and the limits that keep a small file from filling the memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load
from engine.config.resolved import read_resolved
from engine.config.yaml_reader import compose, lines_of, parse, texts_of
from engine.errors import ConfigError, DataError
from tests.refusals import refused

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
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 3000))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))
# Each with the line of the mistake.
BAD = {
    "levels": ("a:\n  " + "[" * 100_000, 2),
    "levels of keys": ("a: " + "{a: " * 200 + "1" + "}" * 200, 1),
    "aliases": (BOMB, 16),
    "a chain of aliases": (CHAIN, 99),
    "merged aliases": (MERGES, 16),
    "itself": ("a: 1\nb: &x\n  c: *x\n", 3),
    "a list of itself": ("a: &x [*x]", 1),
    "digits": ("a: 1\nb: " + "9" * 5000, 2),
    "hexadecimal digits": ("a: 1\nb: 0x" + "f" * 5000, 2),
    "minutes": ("a: 1\nb: 1" + ":1" * 4000, 2),
    "no digits": ("a: 1\nb: 0b_", 2),
    "no integer": ("a: !!int foo", 1),
    "no float": ("a: !!float foo", 1),
    "no date": ("a: !!timestamp foo", 1),
    "no bool": ("a: !!bool foo", 1),
    "an object": ("a: !!python/object/apply:os.system [ls]", 1),
    "a NUL": ('a: 1\nb: "c\\0d"', 2),
    "half a character": ('a: 1\nb: "\\ud800"', 2),
    "a list as key": ("? [a]\n: b", 1),
}


def test_lines_of_keys_and_items() -> None:
    lines = {"context": 2, "run": 4, "run.steps": 5, "run.seed": 6, "defaults": 7, "defaults.0": 8, "defaults.1": 10}
    assert lines_of(compose(TEXT, "a")) == {**lines, "list": 11, "list.0": 11, "list.1": 12}


def test_texts_of_values_are_as_written() -> None:
    assert texts_of(compose("a: 1e3\nb: {c: 'x', d: [2.0, 3]}\ne:\n", "a")) == {
        **{"a": "1e3", "b.c": "x", "b.d.0": "2.0", "b.d.1": "3"},
        "e": "",
    }


def test_nothing_has_no_lines() -> None:
    assert lines_of(compose("", "a")) == lines_of(compose("# only this", "a")) == texts_of(compose("", "a")) == {}


def test_aliases_of_a_usual_size_are_read() -> None:
    assert parse("a: &x {b: 1}\nc: *x\nd: {<<: *x, e: yes}", "a") == {
        **{"a": {"b": 1}, "c": {"b": 1}},
        "d": {"b": 1, "e": True},
    }


@pytest.mark.parametrize("name", BAD)
def test_a_bad_text_is_refused_at_its_line(name: str, tmp_path: Path) -> None:
    """As a recipe and as the config of a run. None takes more memory or time than its own size."""
    text, line = BAD[name]
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    for read in (lambda: load([f"recipe={file}"]), lambda: read_resolved(file)):
        with refused(ConfigError, f"{file}:{line}"):
            read()


@pytest.mark.parametrize("text", ["foo", "'foo'", "3", "null", "~", "2026-01-01", "- a", "[a]", "!!set {a, b}"])
def test_a_text_that_is_no_mapping_is_no_recipe_and_no_config(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        load([f"recipe={file}"])
    with pytest.raises(ConfigError):
        read_resolved(file)


def test_the_error_is_that_of_the_caller() -> None:
    with refused(DataError, "here:1") as problems:
        parse("a: [", "here", DataError, "mend it")
    assert problems[0].hint == "mend it"
