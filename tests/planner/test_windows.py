"""Recipes with attention windows: plans, bounds and estimates of all planners follow them."""

from __future__ import annotations

import numpy as np

from engine.config.load import load
from engine.config.schema import Config
from engine.fit.estimate import estimate
from engine.job import Job
from engine.planner.adaptive.workload import lower_bound
from engine.planner.make import PLANNERS, plan_step
from engine.planner.time.makespan import makespan
from tests.covering import in_turn
from tests.presets import LLAMA7B_256K

BASE = [*LLAMA7B_256K, "cluster=h100x8", "cluster.nodes=2", "context=32K", "batch_tokens=512K", "capacity=8K"]
WINDOWS = ["model.window=4K", "model.windowed=[false,true]"]
MESHES = {"free": ["zero.stage=1"], "lockstep": ["zero.stage=3"], "pipeline": ["parallel.pp=2", "parallel.tp=2"]}


def asked(planner: str, *more: str) -> Config:
    return load([*BASE, f"planner={planner}", *more])


@in_turn("planner, mesh", sorted(PLANNERS), [*MESHES])
def test_a_window_in_every_second_layer_shortens_the_step(planner: str, mesh: str) -> None:
    """So does the bound, which holds, and one in every layer does more."""
    lengths = np.clip(np.random.default_rng(1).lognormal(8, 2, 60), 1, 32 * 1024).astype(np.int64)
    cases = ([], WINDOWS, WINDOWS[:1])
    every, half, all_ = (Job(asked(planner, *MESHES[mesh], *more)).settings for more in cases)
    plan = plan_step(lengths, half)
    ends = [makespan(plan, settings) for settings in (every, half, all_)]
    bounds = [lower_bound(lengths, settings) for settings in (every, half, all_)]
    assert ends[0] > ends[1] > ends[2] and bounds[0] > bounds[1] > bounds[2]
    assert ends[1] >= (1 - 1e-4) * bounds[1]


def test_the_estimate_has_the_same_bytes() -> None:
    plain, windows = (asked("adaptive", "offload.ratio=auto", *more) for more in ([], WINDOWS))
    found = [estimate(Job(config)) for config in (plain, windows)]
    assert found[0] == found[1]
