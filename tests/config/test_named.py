"""Naming documents chooses `lengths=data`, unless lengths are named too."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_cli.options import load_with_weights
from engine.config.explain.origin import COMMAND_LINE, origins
from engine.config.load import load
from engine.config.named import named

GITHUB = "recipe=llama7b-256k"  # its lengths are github


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        ([], "github"),
        (["data.tokenizer=bytes"], "github"),
        (["data.validation_share=0"], "github"),
        (["data.path=a"], "data"),
        (["data=stdlib"], "data"),
        (["data=jsonl", "data.path=a.jsonl"], "data"),
        (["data.path=a", "lengths=byted"], "byted"),
        (["data.path=a", "lengths.max=1M"], "github"),
        (["data.path=a", "lengths=data"], "data"),
    ],
)
def test_documents_on_the_command_line_are_used_unless_lengths_are_named_too(
    overrides: list[str], lengths: str
) -> None:
    said: list[str] = []
    assert load([GITHUB, *overrides], said.append).lengths.name == lengths
    both = lengths != "data" and any(text.startswith("lengths") for text in overrides)
    assert len(said) == both
    if both:
        assert f"{overrides[1]}, not of the documents of data.path=a; to use the documents, remove" in said[0]


@pytest.mark.parametrize("key", ["data.sources.web.path=a", "data.sources={web: {path: a}}", "data.mix={web: 1}"])
def test_sources_and_their_weights_name_documents(key: str) -> None:
    assert named([GITHUB, key]) == (key, None)


@pytest.mark.parametrize(
    ("file", "overrides", "lengths", "place"),
    [
        ("defaults: [llama7b-256k]", [], "github", None),
        ("defaults: [llama7b-256k]\ndata: {tokenizer: bytes}", [], "github", None),
        ("defaults: [llama7b-256k]\ndata:\n  path: a", [], "data", "mine.yaml:3"),
        ("defaults:\n- llama7b-256k\n- override /data: stdlib", [], "data", "mine.yaml:3"),
        ("defaults: [llama7b-256k]\ndata:\n  path: a", ["lengths=byted"], "byted", None),
        ("defaults: [llama7b-256k]\nlengths: {max: 1M}\ndata: {path: a}", [], "github", None),
        ("defaults: [llama7b-256k, override /lengths: byted]", [], "byted", None),
        ("defaults: [llama7b-256k, override /lengths: byted]", ["data.path=a"], "data", "command line (data.path)"),
    ],
)
def test_documents_in_a_recipe_of_ones_own(
    file: str, overrides: list[str], lengths: str, place: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the command line names comes before what the file names."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(file, encoding="utf-8")
    given = ["recipe=./mine.yaml", *overrides]
    assert load(given).lengths.name == lengths
    assert place is None or origins(given)["lengths.name"] == place


def test_a_file_comes_before_those_that_it_builds_on(tmp_path: Path) -> None:
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text("defaults: [llama7b-256k]\nlengths: {max: 1M}\n", encoding="utf-8")
    mine.write_text("defaults: [base.yaml]\ndata: {path: a}\n", encoding="utf-8")
    assert load([f"recipe={mine}"]).lengths.name == "data"
    base.write_text("defaults: [llama7b-256k]\ndata: {path: a}\n", encoding="utf-8")
    mine.write_text("defaults: [base.yaml]\nlengths: {max: 1M}\n", encoding="utf-8")
    said: list[str] = []
    assert load([f"recipe={mine}"], said.append).lengths.name == "github"
    assert said == [
        f"lengths are those of {mine}:2, not of the documents of {base}:2; to use the documents, remove {mine}:2"
    ]


def test_the_origin_of_lengths_is_what_names_the_documents() -> None:
    places = origins([GITHUB, "data=jsonl", "data.path=a"])
    assert places["lengths.name"] == f"{COMMAND_LINE} (data.path)"
    assert places["data.path"] == COMMAND_LINE


@pytest.mark.parametrize(
    ("file", "overrides", "said"),
    [
        ("", ["data.path=a", "data.sources.web.path=b"], True),
        ("data: {path: a}", ["data.sources.web.path=b"], True),
        ("", ["data.path=a"], False),
        ("", ["data.sources.web.path=b"], False),
        ("", ["data.path=a", "data.sources.web.pattern=*.txt"], False),  # which is read below data.path
    ],
)
def test_a_path_that_no_source_reads_is_named(file: str, overrides: list[str], said: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(f"defaults: [quickstart]\n{file}\n")
    given = [f"recipe={tmp_path / 'mine.yaml'}", *overrides]
    lines: list[str] = []
    load_with_weights(given, say_model=lines.append)
    assert [line.startswith("data.path has no effect") for line in lines if "data.path" in line] == [True] * said
