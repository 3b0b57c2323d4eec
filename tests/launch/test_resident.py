"""A real run of two ranks holds what `estimate-memory` says: all of a process, to a tenth."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.data.lengths import step_lengths
from engine.launch.run import train
from engine.planner.estimate import estimate, of_plans
from engine.planner.make import plan_step
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
    config = configured(tmp_path, [500, 1000, 900] * 8, keys)
    assert resident(config) == pytest.approx(estimate(config, PlanSettings.of(config)).peak, rel=0.1)


@pytest.mark.world
@pytest.mark.parametrize("keys", [[], ["zero.stage=2", "recompute=layer"]], ids=["zero-1", "zero-2"])
def test_of_planned_steps_with_one_micro_batch_a_rank(tmp_path: Path, keys: list[str]) -> None:
    """Gradients and their bucket fill while activations go: `--plan` knows that they are not there together."""
    sizes = ["context=4K", "capacity=2K", "batch_tokens=4K"]
    config = configured(tmp_path, [4000] * 4, [*sizes, *keys])
    settings = PlanSettings.of(config)
    plans = [plan_step(lengths, settings) for lengths in step_lengths(config, config.run.steps)]
    assert [plan.micro_batches for plan in plans] == [2, 2]
    assert resident(config) == pytest.approx(of_plans(config, settings, plans).peak, rel=0.1)


def configured(folder: Path, lengths: list[int], keys: list[str]) -> Config:
    """Return a run of documents of so many letters."""
    file, letters = folder / "documents.jsonl", random.Random(0)
    texts = ["".join(letters.choices("abcdefgh ", k=length)) for length in lengths]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    places = [f"data.path={file}", f"run.out={folder / 'run'}", "run.steps=2"]
    return load(["recipe=quickstart", *(f"model.{key}" for key in SIZE), *RUN, *places, *keys])


def resident(config: Config) -> int:
    """Train, and return the most that a rank's process held."""
    train(config, say=lambda line: None)
    found = [line["peak_memory"] for line in read_metrics(Path(config.run.out) / "metrics.jsonl")]
    assert found == sorted(found)
    return int(found[-1])
