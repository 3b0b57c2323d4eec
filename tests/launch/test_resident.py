"""A real run of two ranks holds what `estimate-memory` says: all of a process, to a tenth."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from engine.config.load import load
from engine.launch.run import train
from engine.planner.estimate import estimate
from engine.planner.settings import PlanSettings
from engine.trainer.metrics import read_metrics

SIZE = ["layers=6", "hidden=512", "heads=8", "kv_heads=8", "ffn=1376"]
RUN = [
    "context=1K",
    "capacity=512",
    "batch_tokens=2K",
    "offload.ratio=0",
    "data.format=jsonl",
    "data.validation_tokens=0",
]


@pytest.mark.world
@pytest.mark.parametrize(
    "keys",
    [
        [],
        ["zero.stage=2", "batch_tokens=1K", "recompute=layer"],
        ["zero.stage=3", "batch_tokens=1K", "recompute=layer"],
    ],
    ids=["zero-1", "zero-2", "zero-3"],
)
def test_what_is_resident_is_what_was_estimated(tmp_path: Path, keys: list[str]) -> None:
    file, letters = tmp_path / "documents.jsonl", random.Random(0)
    texts = ["".join(letters.choices("abcdefgh ", k=length)) for length in [500, 1000, 900] * 8]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    places = [f"data.path={file}", f"run.out={tmp_path / 'run'}", "run.steps=2"]
    config = load(["recipe=quickstart", *(f"model.{key}" for key in SIZE), *RUN, *places, *keys])
    expected = estimate(config, PlanSettings.of(config)).peak
    train(config, say=lambda line: None)
    found = [line["peak_memory"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(expected, rel=0.1)
