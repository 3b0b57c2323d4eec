from __future__ import annotations

import pytest

from engine.config.explain.spelling import did_you_mean, nearest

NAMES = ["context", "run.steps", "run.seed", "model.name", "data.name"]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("contxt", "context"),
        ("steps", "run.steps"),
        ("train.seed", "run.seed"),
        ("run.step", "run.steps"),
        ("qqq", None),
    ],
)
def test_nearest(word: str, name: str | None) -> None:
    assert nearest(word, NAMES) == name


def test_hint() -> None:
    assert did_you_mean("fp16", ["bf16", "fp32", "fp64"]) == "did you mean bf16?", "16 is its number"
    assert did_you_mean("h800x8", ["h100x8", "h200x8"]) == "did you mean h100x8 or h200x8?", "neither is nearer"
    assert did_you_mean("seed", [*NAMES, "see"]) == "did you mean run.seed?"
    assert did_you_mean("contxt", NAMES) == "did you mean context?"
    assert did_you_mean("big", ["big-1m", "big-2m", "small", "big.key"]) == "did you mean big-1m or big-2m?"
    assert did_you_mean("b", ["ba", "bb", "bc"]) == "did you mean ba, bb or bc?"
    assert did_you_mean("SGD", ["adamw", "sgd"]) == "did you mean sgd?"
    assert did_you_mean("model.nam", ["model.name", "model.hidden"]) == "did you mean model.name?"
    assert did_you_mean("model.foo", ["model.name", "model.hidden"]) is None, "what they share is no likeness"
    assert did_you_mean("qqq", NAMES, "see the list") == "see the list"
