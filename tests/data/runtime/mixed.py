"""A run of sources of all kinds: texts, rows with masks, a token file; several blocks of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.data.pack import pack
from engine.data.sources import jsonl


def mixed_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Config:
    """A config of texts of which some cannot be used, rows with masks, and a token file."""
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 500)
    texts = ["{" if number % 9 == 0 else json.dumps({"text": "x" * (number % 40)}) for number in range(150)]
    rows = list[dict[str, list[int]]]()
    for length in range(3, 33):
        rows.append({"ids": [*range(length)], "loss_mask": [0, *(int(at % 5 < 2) for at in range(1, length))]})
    (tmp_path / "texts.jsonl").write_text("\n".join(texts))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "packed.jsonl").write_text("\n".join(json.dumps({"text": "y" * number}) for number in range(1, 50)))
    pack(load(["data=jsonl", f"data.path={tmp_path / 'packed.jsonl'}"]).data, tmp_path / "packed", workers=1)
    sources = [
        f"data.sources.texts.path={tmp_path / 'texts.jsonl'}",
        *(f"data.sources.rows.path={tmp_path / 'rows.jsonl'}", "data.sources.rows.field=ids"),
        *(f"data.sources.packed.path={tmp_path / 'packed'}", "data.sources.packed.format=tokens"),
        *("data.mix={texts: 2, rows: 1, packed: 1}", "data.quarantine_after=2", "data.validation_share=0.2"),
    ]
    sizes = ["context=16", "capacity=16", "batch_tokens=200", "data.validation_tokens=120"]
    return load(["recipe=quickstart", "data=jsonl", f"data.cache={tmp_path / 'cache'}", *sources, *sizes, *more])
