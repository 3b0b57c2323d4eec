"""Flags that are other names of keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bytescale_cli.main import run
from bytescale_cli.options import named_as_typed, plot_path, with_aliases, writable
from engine.config.load import load
from engine.errors import ConfigError, Problem
from tests.refusals import refused

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
    with refused(ConfigError, "--out", "--nproc"):
        with_aliases(["run.out=a", "cluster.ranks_per_node=2"], {OUT: "b", NPROC: 3})


def test_an_error_names_what_was_typed() -> None:
    problem_of_keys = Problem(
        "is not run.out=a, nor run.output", "cluster.ranks_per_node", "set cluster.ranks_per_node=1"
    )
    for aliases, problem in (
        ({OUT: "b", NPROC: 0}, Problem("is not --out a, nor run.output", "--nproc", "set --nproc 1")),
        ({OUT: None, NPROC: None}, problem_of_keys),
    ):
        with pytest.raises(ConfigError) as caught, named_as_typed(aliases):
            raise ConfigError.of([problem_of_keys, Problem("is not set")])
        assert caught.value.problems == (problem, Problem("is not set"))


def test_a_page_may_be_new_replaced_or_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "link.html").symlink_to("old.html")
    assert plot_path(None) is None
    assert plot_path(str(tmp_path / "new.html")) == tmp_path / "new.html"
    assert plot_path(str(tmp_path / "link.html")) == plot_path(str(tmp_path / "old.html")) == tmp_path / "old.html"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "old.html"], "the probe is gone"
    assert (tmp_path / "old.html").read_text() == "old"


@pytest.mark.parametrize("name", ["none/a.html", "folder.html", "file/a.html", "x" * 300 + ".html", "a.png", ""])
def test_what_is_no_place_for_a_page_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:  # long names make long messages
        plot_path(str(tmp_path / name) if name else "")
    assert [problem.key for problem in caught.value.problems] == ["--plot"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.html"]


def test_a_picture_is_for_commands_that_draw_one(tmp_path: Path) -> None:
    kinds = (".html", ".svg")
    assert plot_path(str(tmp_path / "a.svg"), kinds=kinds) == tmp_path / "a.svg"
    with refused(ConfigError, "--plot"):
        plot_path(str(tmp_path / "a.svg"))
    with refused(ConfigError, "--plot"):
        plot_path(str(tmp_path / "a.png"), kinds=kinds)


def test_a_device_is_never_replaced() -> None:
    with refused(ConfigError, "--out"):
        writable(os.devnull, "--out")


def test_a_read_only_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write to any file, so what the system would say to others is put in its place."""
    (tmp_path / "a.html").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with refused(ConfigError, "--plot"):
        writable(str(tmp_path / "a.html"), "--plot")


COMMANDS = (
    "profile-data",
    "plan",
    "simulate --no-tuned --planners static --plot {}/a.html",
    "data lint",
    "data head",
    "train --dry-run",
)


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_bytes_for_a_model_with_a_vocabulary_are_a_warning_once_and_none_if_chosen(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several sources, too, and if documents are read again for a page."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a text " * 500)
    Path("b.txt").write_text("another " * 500)
    Path("mine.yaml").write_text("defaults: quickstart\ndata:\n  tokenizer: bytes\n")
    words = ["data=folder", "data.sources.a.path=.", "data.sources.a.pattern=a.txt", "data.sources.b.path=."]
    words += ["data.sources.b.pattern=b.txt", "data.mix={a: 1, b: 1}", "model.vocab=32000", "run.steps=1"]
    words += [f"data.cache={tmp_path}/cache", "data.validation_share=0"]
    known = ["data.tokenizer=bytes"] if COMMANDS.index(command) % 2 else ["recipe=mine.yaml"]
    for more, count in ([], 1), (known, 0):
        assert run([*command.format(tmp_path).split(), *words, *more]) == 0
        assert capsys.readouterr().err.count("tokens are bytes") == count, more
