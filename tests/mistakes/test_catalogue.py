"""`pytest --accept` rewrites answers, and nothing else of a file; and golden files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import accepted
from tests.mistakes import catalogue
from tests.mistakes.catalogue import Mistake, accept

BEFORE = """\
# What is typed
- name: first
  run: plan a=1  # by hand
  code: 2
  answers:
  - {key: "a", message: "old"}

- name: second
  run: plan b=1
  code: 2
"""


def test_answers_are_replaced_and_the_rest_of_the_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "FOLDER", tmp_path)
    (tmp_path / "keys.yaml").write_text(BEFORE)
    accept(Mistake("keys", "second", "plan b=1", 2), [{"key": "b", "message": "is b", "hint": 'write "c"'}])
    added = '  answers:\n  - {key: "b", message: "is b", hint: "write \\"c\\""}\n'
    assert (tmp_path / "keys.yaml").read_text() == BEFORE + added
    accept(Mistake("keys", "first", "plan a=1", 2), [{"message": "new"}, {"key": "x" * 120, "message": "y"}])
    long = f'  - {{key: "{"x" * 120}",\n     message: "y"}}\n'
    after = BEFORE.replace('  - {key: "a", message: "old"}\n', f'  - {{message: "new"}}\n{long}') + added
    assert (tmp_path / "keys.yaml").read_text() == after


def test_golden_files_are_compared_or_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").write_text("a")
    monkeypatch.setattr(accepted, "REWRITE", False)
    with pytest.raises(AssertionError):
        accepted.accepted(tmp_path / "old", "b")
    with pytest.raises(AssertionError):
        accepted.accepted_folder(tmp_path, {})
    with pytest.raises(AssertionError):
        accepted.accepted_folder(tmp_path / "folder", {"new": "b"})
    accepted.accepted_names(tmp_path, ["old", "of a slower test"])
    monkeypatch.setattr(accepted, "REWRITE", True)
    for folder in (tmp_path, tmp_path / "folder"):
        accepted.accepted_folder(folder, {"new": "b"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "new"]
    assert [(path.name, path.read_text()) for path in (tmp_path / "folder").iterdir()] == [("new", "b")]
