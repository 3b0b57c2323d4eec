"""One rank's part of a step of 1M tokens is an eighth of it, and the step adds what one GPU cannot show."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import one_rank_1m
from benchmarks.gpu.one_rank_1m import CASES, DEGREE, TINY, modelled_step, part, step
from engine.attention.layout import layout
from engine.config.load import load
from engine.fit.estimate import estimate
from engine.hardware.micro_batches import random_inputs
from engine.job import Job
from tests.benchmarks.gpu.one_rank import alone
from tests.world import run_world

pytestmark = pytest.mark.long


def test_a_rank_has_131072_queries_and_eight_rounds_of_keys() -> None:
    one = layout(part(2**20))
    assert one.tokens == 2**17 == 2**20 // DEGREE
    (ring,) = one.rings
    assert ring.shard.degree == DEGREE and ring.shard.length == 2**20
    positions = random_inputs(part(2**20), 512).positions
    assert len(positions) == 2**17 and 2**19 < positions.max() < 2**20, "both ends of the zigzag"


def test_what_a_gpu_will_be_asked_for_has_the_shape_of_the_recipe() -> None:
    recipe = load(["recipe=qwen3-8b-1m-1node"])
    for case in CASES:
        config = case.config
        assert config.model == recipe.model.model_copy(update={"layers": case.layers})
        assert (config.recompute, config.dtype) == (recipe.recompute, "bf16")
        assert Job(config).settings.ranks == 1
        assert estimate(Job(config.model_copy(update={"capacity": 2**17, "context": 2**17}))).fits


def test_the_step_has_all_layers_and_what_was_not_measured() -> None:
    whole, other, layers = modelled_step("qwen3-8b-1m-1node")
    assert layers == 36 and 0 < other < 0.01 * whole
    layer = (whole - other - 2.0) / layers  # as modelled, with 2 s for the head
    found = step({"layers": 1, "seconds": 2 + layer}, {"layers": 3, "seconds": 2 + 3 * layer})
    assert found["step_s"] == pytest.approx(whole) and found["holds"]
    assert found["steps_s"] == pytest.approx(found["modelled_s"])
    slow = step({"layers": 1, "seconds": 2 + 2 * layer}, {"layers": 3, "seconds": 2 + 6 * layer})
    assert slow["step_s"] == pytest.approx(2 * whole - other - 2) and not slow["holds"]
    assert slow["steps_s"]["qwen3-8b-2m-2nodes"] > 1.9 * found["steps_s"]["qwen3-8b-2m-2nodes"]


def tiny() -> dict[str, Any]:
    return one_rank_1m.measure(TINY[1], alone())


@pytest.mark.world
def test_a_tiny_one_runs_with_offload() -> None:
    (found,) = run_world(1, tiny)
    assert found["seconds"] > 0 and found["first_s"] > 0 and found["moved"] == pytest.approx(1 / 3)
