from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.config import schema
from engine.data.sources.formats import open_source


def test_the_format_selects_the_source(tmp_path: Path, make_data: Callable[..., schema.Data]) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n')
    (tmp_path / "a.txt").write_bytes(b"two")
    assert open_source(make_data(tmp_path, pattern="*.txt")).read(0) == b"two"
    assert open_source(make_data(tmp_path / "a.jsonl", format="jsonl")).read(0) == b"one"
