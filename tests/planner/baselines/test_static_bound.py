"""The bound of the static planner against simulated steps of its plans. If it is too high, a search drops the best."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config.load import load
from engine.job import Job
from engine.planner.baselines.static_bound import static_bound
from engine.planner.make import plan_step
from engine.planner.time.makespan import makespan
from tests.presets import LLAMA7B_256K, fixed

SMALL = [*LLAMA7B_256K, "cluster=h100x8", "context=64K", "planner=static", "batch_tokens=2M"]
CASES = {
    "free": [],
    "a group that does not fill whole nodes": ["cluster.nodes=3", "cluster.ranks_per_node=4", "capacity=12K"],
    "rings recompute": ["recompute=layer"],
    "lockstep": ["zero.stage=3"],
    "experts": [*fixed("mixtral8x7b-32k-4nodes", 3), "cluster.nodes=8", "recompute=layer_keep_attention"],
    "offload": ["zero.stage=3", "capacity=64K", "context=64K"],
    "pipeline": ["parallel.pp=4", "parallel.tp=2", "cluster.nodes=8"],
    "pipeline with offload": ["parallel.pp=2", "parallel.tp=2", "cluster.nodes=8", "capacity=40K"],
    "windows": ["model.window=4K", "model.windowed=[true,false]"],
    "unsplit": ["context=8K", "capacity=16K", "zero.stage=3"],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("longest", [64 * 1024, pytest.param(200, marks=pytest.mark.slow)])
def test_the_bound_is_just_below_the_simulated_time(case: str, longest: int) -> None:
    config = load([*SMALL, "cluster.nodes=4", *CASES[case]])
    settings = Job(config).settings
    lengths = np.random.default_rng(longest).lognormal(7, 2, 400)
    lengths = np.clip(lengths, 1, min(longest, config.context)).astype(np.int64)
    simulated = makespan(plan_step(lengths, settings), settings)
    assert 0.95 * simulated <= static_bound(lengths, settings) <= simulated


def test_slow_ranks_count() -> None:
    config = load([*SMALL, "cluster.nodes=4", "cluster.speeds=[100,50,100,80]"])
    settings, lengths = Job(config).settings, np.full(64, 16 * 1024)
    simulated = makespan(plan_step(lengths, settings), settings)
    even = static_bound(lengths, Job(load([*SMALL, "cluster.nodes=4"])).settings)
    assert 1.5 * even < 0.99 * simulated <= static_bound(lengths, settings) <= simulated
