from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.config import schema
from engine.data.source import open_source


def test_the_format_chooses_what_reads(tmp_path: Path, make_data: Callable[..., schema.Data]) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n')
    assert open_source(make_data(tmp_path)).read(0) == b'{"text": "one"}\n'
    assert open_source(make_data(tmp_path / "a.jsonl", format="jsonl")).read(0) == b"one"
