"""What a GPU will be asked for is a config that loads, and a tiny one of it runs here."""

from __future__ import annotations

import pytest

from benchmarks import gpu_train
from engine.config.load import load
from tests.benchmarks.one_rank import alone
from tests.world import run_world


@pytest.mark.parametrize("case", gpu_train.CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_every_case_is_a_config(case: tuple[str, int, str, tuple[str, ...]]) -> None:
    config = gpu_train.config_of(*case)
    assert (config.context, config.recompute, config.model.vocab) == (case[1], case[2], gpu_train.VOCAB)


def tiny() -> dict[str, str | float]:
    return gpu_train.measure(load(["recipe=quickstart", "context=64", "capacity=64", "batch_tokens=64"]), alone())


@pytest.mark.world
def test_a_tiny_model_is_measured() -> None:
    (found,) = run_world(1, tiny)
    assert found["tokens_per_s"] > 0 and 0 < found["mfu"] < 1 and found["kernel"] == "fused_cpu"
