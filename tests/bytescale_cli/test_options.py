"""Flags that are other names of keys."""

from __future__ import annotations

import pytest

from bytescale_cli.options import with_aliases
from engine.config.load import load
from engine.errors import ConfigError

OUT, NPROC = ("--out", "run.out"), ("--nproc", "cluster.ranks_per_node")


def test_flags_become_overrides() -> None:
    assert with_aliases(["a=1"], {OUT: "b", NPROC: 3}) == ["a=1", "run.out=b", "cluster.ranks_per_node=3"]
    assert with_aliases(["a=1"], {OUT: None, NPROC: None}) == ["a=1"]


@pytest.mark.parametrize(
    "value", ["3", "a b", "a=b,c", "it's", 'a"b', "{x}", "back\\slash", "end\\", 'both\\"', "null"]
)
def test_any_text_arrives_as_it_was_given(value: str) -> None:
    assert load(with_aliases([], {OUT: value})).run.out == value


@pytest.mark.parametrize("given", ["run.out=b", "run.out='b'", 'run.out="b"'])
def test_both_given_and_equal(given: str) -> None:
    assert with_aliases([given], {OUT: "b"}) == [given]


def test_both_given_and_different_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        with_aliases(["run.out=a", "cluster.ranks_per_node=2"], {OUT: "b", NPROC: 3})
    assert [problem.key for problem in caught.value.problems] == ["--out", "--nproc"]
