"""A host without a file of the documents, or with another one, is an error before training, which names both."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import schema
from engine.data import host_files
from engine.data.host_files import check_files, write_files
from engine.data.sources.formats import FORMATS
from engine.data.sources.jsonl import JsonlBlock
from engine.errors import DataError
from tests.refusals import refused


@pytest.fixture
def listed(tmp_path: Path, make_data: Callable[..., schema.Data]) -> Path:
    """The list of the files of two sources."""
    (tmp_path / "texts").mkdir()
    for number in range(70):  # two blocks
        (tmp_path / "texts" / f"{number:02}").write_text("text " * number)
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 9)
    texts = FORMATS["folder"].blocks(make_data(tmp_path / "texts", pattern="*"))
    web = [*FORMATS["jsonl"].blocks(make_data(tmp_path / "a.jsonl", format="jsonl"))]
    there = JsonlBlock("s3://bucket/a.jsonl", "text", ((0, 9),), 9)  # is on no host
    write_files(tmp_path / "files", {"texts": texts, "web": [*web, there], "none": []})
    return tmp_path / "files"


def test_a_host_with_the_same_files_is_well(listed: Path) -> None:
    assert len(listed.read_text().splitlines()) == 71
    check_files(listed, "node7")


@pytest.mark.parametrize("how", ["missing", "dangling", "folder", "pipe", "shorter", "longer"])
@pytest.mark.parametrize(("source", "name"), [("texts", "texts/67"), ("web", "a.jsonl")])
def test_another_file_is_refused_with_the_host_and_the_source(
    source: str, name: str, how: str, listed: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    content = path.read_bytes()
    path.unlink()
    if how == "dangling":
        path.symlink_to(tmp_path / "gone")
    elif how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how != "missing":
        path.write_bytes(content[1:] if how == "shorter" else content + b"\n")
    with refused(DataError, str(path)) as problems:
        check_files(listed, "node7")
    assert problems[0].message.startswith(f"source {source!r} on node7: ") and problems[0].hint


def test_it_takes_no_longer_than_its_limit(listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that it did not look at are errors when their blocks are needed."""
    monkeypatch.setattr(host_files, "_LOOK_S", 0.0)
    (tmp_path / "a.jsonl").unlink()
    check_files(listed, "node7")
