"""What a GPU will be asked for is a config that loads, and a tiny one of it runs here."""

from __future__ import annotations

import pytest

from benchmarks.gpu import train
from engine.config.load import load
from tests.benchmarks.gpu.one_rank import alone
from tests.world import run_world

pytestmark = pytest.mark.long


def test_every_case_is_a_config() -> None:
    for case in (*train.CASES, *train.PLANS, *train.TRACES):
        config = train.config_of(*case)
        assert (config.context, config.recompute, config.model.vocab) == (case[1], case[2], train.VOCAB)


def tiny() -> dict[str, str | float]:
    return train.measure(load(["recipe=quickstart", "context=64", "capacity=64", "batch_tokens=64"]), alone())


@pytest.mark.world
def test_a_tiny_model_is_measured() -> None:
    (found,) = run_world(1, tiny)
    assert found["tokens_per_s"] > 0 and 0 < found["mfu"] < 1 and found["kernel"] == "fused_cpu"
