"""A real run on CPU processes holds at most what `estimate-memory` says, and at least 70 % of it; a pipeline 85 %.

A CPU process holds both what the estimate places on the device and what it places on the host, where the copy for
checkpoints is reserved after the first step. The allowance of a CPU process is an upper bound: how much freed memory
the C library keeps depends on the machine.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from unittest.mock import patch

import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.data.lengths import step_lengths
from engine.fit.estimate import Estimate, estimate, estimate_plans
from engine.job import Job
from engine.launch.run import train
from engine.planner.make import plan_step
from engine.run.metrics import read_metrics

SIZE = ["layers=6", "hidden=512", "heads=8", "kv_heads=8", "ffn=1376"]
RUN = [
    "context=1K",
    "capacity=512",
    "batch_tokens=2K",
    "offload.ratio=0",
    "data.format=jsonl",
    "data.validation_tokens=0",
]


@pytest.mark.slow  # each starts two ranks, which import everything; test_estimate_measured.py has the tensors alone
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
    check(resident(config), estimate(Job(config)))


@pytest.mark.slow  # as above; nothing else has ZeRO-2
@pytest.mark.world
@pytest.mark.parametrize(
    "keys",
    [[], ["zero.stage=2", "recompute=layer"]],
    ids=["zero-1", "zero-2"],
)
def test_of_planned_steps_with_one_micro_batch_a_rank(tmp_path: Path, keys: list[str]) -> None:
    """Gradients fill while activations are released: `--plan` knows that they are never held together."""
    sizes = ["context=2K", "capacity=1K", "batch_tokens=2K"]
    config = configured(tmp_path, [2000] * 4, [*sizes, *keys])
    settings = Job(config).settings
    plans = [plan_step(lengths, settings) for lengths in step_lengths(config, config.run.steps)]
    assert [plan.micro_batches for plan in plans] == [2, 2]
    check(resident(config), estimate_plans(Job(config), plans))


@pytest.mark.world
def test_of_a_pipeline_with_tensor_parallelism(tmp_path: Path) -> None:
    """`--plan` knows how many micro-batches are in flight."""
    mesh = ["parallel.tp=2", "parallel.pp=2", "cluster.ranks_per_node=4"]
    sizes = ["context=512", "capacity=512", "batch_tokens=2K"]
    config = configured(tmp_path, [500] * 16, [*mesh, *sizes])
    settings = Job(config).settings
    plans = [plan_step(lengths, settings) for lengths in step_lengths(config, config.run.steps)]
    assert all(plan.mode == "pipeline" and plan.micro_batches >= 4 for plan in plans)
    check(resident(config), estimate_plans(Job(config), plans), at_least=0.85)


def check(resident: int, found: Estimate, at_least: float = 0.7) -> None:
    both = found.peak + found.host
    print(f"resident {resident / 2**20:.0f} MiB, estimate {both / 2**20:.0f}: {resident / both:.3f}")
    assert found.host == found.checkpoint > 0
    assert at_least * both <= resident <= both


def configured(folder: Path, lengths: list[int], keys: list[str]) -> Config:
    """A run on documents of these lengths in characters."""
    file, letters = folder / "documents.jsonl", random.Random(0)
    texts = ["".join(letters.choices("abcdefgh ", k=length)) for length in lengths]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    places = [f"data.path={file}", f"run.out={folder / 'run'}", "run.steps=2"]
    return load(["recipe=quickstart", *(f"model.{key}" for key in SIZE), *RUN, *places, *keys])


def resident(config: Config) -> int:
    """Train, and return the peak resident bytes of a rank's process."""
    # The peak is that of the ranks. A report takes the launcher seconds.
    with patch("engine.launch.outcome.write_page", lambda folder, say: None):
        train(config, say=lambda line: None)
    found = [line["peak_memory"] for line in read_metrics(Path(config.run.out) / "metrics.jsonl")]
    assert found == sorted(found)
    return int(found[-1])
