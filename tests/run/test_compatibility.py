from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.load import load
from engine.errors import CheckpointError
from engine.run.checkpoints import TrainState
from engine.run.compatibility import check_compatible, must_match

CHECKPOINT = Path("step-00000001")


def state(ranks: int = 2) -> TrainState:
    """The state of a quickstart as read from its manifest."""
    kept = json.loads(json.dumps(must_match(load(["recipe=quickstart"]))))
    return TrainState(step=1, epoch=0, position=3, ranks=ranks, fingerprint="f", must_match=kept)


@pytest.mark.parametrize(
    "change",
    ["optimizer.lr=0.5", "run.steps=7", "batch_tokens=64K", "planner=naive", "model.name=other", "run.out=new"],
)
def test_rates_batches_and_plans_may_change(change: str) -> None:
    check_compatible(CHECKPOINT, state(), load(["recipe=quickstart", change]), ranks=2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("run.seed=9", "run.seed: "),
        ("model.layers=7", "model.layers: "),
        ("model.rope_theta=7", "model.rope_theta: "),
        ("dtype=bf16", "dtype: fp32 -> bf16"),
        ("optimizer.name=sgd", "optimizer.name: adamw -> sgd"),
        ("optimizer.on_host=true", "optimizer.on_host: null -> True"),
        ("data.validation_share=0.5", "data.validation_share: "),
    ],
)
def test_values_that_tensors_or_document_order_depend_on_must_match(change: str, expected: str) -> None:
    with pytest.raises(CheckpointError, match=f"cannot resume from the checkpoint: {expected}") as caught:
        check_compatible(CHECKPOINT, state(), load(["recipe=quickstart", change]), ranks=2)
    assert caught.value.problems[0].key == str(CHECKPOINT)


def test_biases_belong_to_their_rate() -> None:
    experts = ["recipe=quickstart", "model.experts=4", "balance.by=bias"]
    kept = must_match(load([*experts, "balance.bias_rate=0.1"]))
    before = TrainState(step=1, epoch=0, position=3, ranks=2, fingerprint="f", must_match=kept)
    check_compatible(CHECKPOINT, before, load([*experts, "balance.bias_rate=0.1", "balance.z_weight=1"]), ranks=2)
    for change, expected in (
        ("balance.bias_rate=0.2", "balance.bias_rate: 0.1 -> 0.2"),
        ("balance.by=loss", "balance.by: bias -> loss"),
        ("model.experts=1", "model.experts: 4 -> 1"),
    ):
        with pytest.raises(CheckpointError, match=f"cannot resume from the checkpoint: {expected}$"):
            check_compatible(CHECKPOINT, before, load([*experts, change]), ranks=2)
    without = replace(before, must_match=must_match(load([*experts, "balance.by=loss"])))
    with pytest.raises(CheckpointError, match=r"checkpoint: balance\.by: not bias -> bias$"):
        check_compatible(CHECKPOINT, without, load(experts), ranks=2)


def test_a_changed_rotary_scaling_is_reported_by_its_keys() -> None:
    with pytest.raises(
        CheckpointError, match=r"checkpoint: model\.rope\.kind: none -> linear; model\.rope\.factor: null -> 2"
    ):
        check_compatible(CHECKPOINT, state(), load(["model.rope.kind=linear", "model.rope.factor=2"]), ranks=2)


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(CheckpointError, match="ranks: 4 -> 2"):
        check_compatible(CHECKPOINT, state(ranks=4), load(["recipe=quickstart"]), ranks=2)
