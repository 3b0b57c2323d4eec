"""A run whose documents do not last until run.steps ends like any other, and says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config.load import load
from engine.launch.run import train
from engine.run.checkpoints import newest_first, read
from tests.trainer.worlds import in_worlds

pytestmark = pytest.mark.world
SMALL = [
    *(
        "recipe=quickstart",
        "context=192",
        "capacity=192",
        "batch_tokens=384",
        "run.steps=20",
        "cluster.ranks_per_node=1",
    ),
    *("model.layers=2", "model.hidden=36", "model.heads=2", "model.kv_heads=1", "model.ffn=50"),
    *("data=folder", "data.pattern=*.txt", "data.validation_share=0.2", "data.validation_tokens=256"),
    *("run.validate_every=50", "run.checkpoint_every=50", "optimizer.warmup_steps=1"),
]


def test_a_segment_without_documents_ends_the_run_and_what_it_says_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last step is validated and saved. The run then goes on with the weights that the line proposes."""
    in_worlds(monkeypatch, last=20)
    for name, size in (("web", 12), ("code", 30)):
        (tmp_path / name).mkdir()
        for number in range(size):
            (tmp_path / name / f"{number}.txt").write_text(f"text {number} of {name} " * 6)
    named = [f"data.sources.{name}.path={tmp_path / name}" for name in ("web", "code")]
    run, said = tmp_path / "run", list[str]()
    common = [*SMALL, *named, "data.exhausted=drop", f"run.out={run}", f"data.cache={tmp_path / 'cache'}"]

    first = "data.mix=[{weights: {web: 1}}, {step: 15, weights: {code: 1}}]"
    result = train(load([*common, first]), say=said.append)["train"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ended = len(lines)
    assert 1 <= ended < 15 and [line["step"] for line in lines] == [*range(1, ended + 1)]
    assert [line["step"] for line in lines if "validation_loss" in line] == [ended]
    assert result["steps"] == ended and result["validation_loss"] == lines[-1]["validation_loss"]
    (checkpoint,) = newest_first(run / "checkpoints")
    assert read(checkpoint).step == ended
    why = (
        "all documents of web were used, and the segment of data.mix from step 0 on has no other source; give code a "
        "weight there to continue, or set data.exhausted=repeat"
    )
    assert f"{run}: the run ended after step {ended} of run.steps=20: {why}" in said

    said.clear()
    train(load([*common, first]), say=said.append)
    assert f"{run}: nothing left to train after step {ended}: {why}" in said
    train(load([*common, "data.mix=[{weights: {web: 1, code: 1}}, {step: 15, weights: {code: 1}}]"]), say=said.append)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] > ended and lines[-1]["mixture"]["code"]["tokens"] > 0
    both = "all documents of web, code were used; set data.exhausted=repeat to use them again"
    assert f"{run}: the run ended after step {lines[-1]['step']} of run.steps=20: {both}" in said
