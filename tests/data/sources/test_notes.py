"""Lines and errors about a source: bytes for a model with a vocabulary, hidden files, documents that teach nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config.schema import Data
from engine.data.pack import pack
from engine.data.sources.formats import FORMATS
from engine.data.sources.notes import notes
from engine.errors import DataError
from tests.root import ROOT


def test_bytes_for_a_model_with_a_vocabulary_are_a_warning(tmp_path: Path, make_data: Callable[..., Data]) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / ".hidden").write_text("text")
    data = make_data(tmp_path)
    blocks = FORMATS["folder"].blocks(data)
    assert [line.startswith("warning") for line in notes(data, blocks, 128_256)] == [False, True]
    assert len([*notes(data, blocks, 258)]) == len([*notes(data, blocks)]) == 1
    (tmp_path / "ids").mkdir()
    (tmp_path / "ids" / "a").write_text('{"input_ids": [1, 2]}\n')
    ids = make_data(tmp_path / "ids" / "a", format="jsonl", field="input_ids")
    assert not [*notes(ids, FORMATS["jsonl"].blocks(ids), 128_256)]


def test_documents_of_which_nothing_counts_are_not_called_missing(
    tmp_path: Path, make_data: Callable[..., Data]
) -> None:
    row = {"input_ids": [1, 2, 3], "loss_mask": [1, 0, 0]}  # the first id is no label
    (tmp_path / "a").write_text(f"{json.dumps(row)}\n" * 3)
    data = make_data(tmp_path / "a", format="jsonl", field="input_ids")
    with pytest.raises(DataError) as caught:
        pack(data, tmp_path / "out" / "a", workers=1)
    (problem,) = caught.value.problems
    assert problem.key == data.path and "loss_mask" in str(problem.hint)


def test_no_hint_names_a_package_that_is_not_published() -> None:
    paths = [
        *ROOT.glob("engine/**/*.py"),
        *ROOT.glob("bytescale_cli/*.py"),
        *ROOT.glob("docs/*.md"),
        ROOT / "README.md",
    ]
    assert [path for path in paths if "bytescale[" in path.read_text(encoding="utf-8")] == []
