from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.config.load import load
from engine.cost.allowance import Allowance
from engine.job import Job
from engine.units import PPM


def usable(memory: int) -> int:
    """Bytes that tensors may use of a device of cluster=local."""
    job = Job(load([]))
    return Allowance.of(job.config, job.cluster).usable(memory)


def test_they_come_from_the_config_and_travel() -> None:
    config = load(["cluster.ranks_per_node=3", "planner=naive", "capacity=2K", "context=6K", "planner.mode=lockstep"])
    found = Job(config).settings
    assert (found.planner, found.mode, found.ranks) == ("naive", "lockstep", 3)
    assert (found.capacity, found.context, found.device_memory) == (2048, 6144, usable(config.cluster.device_memory))
    assert pickle.loads(pickle.dumps(found)) == found


def test_auto_is_free_under_zero_1() -> None:
    assert Job(load(["planner.mode=auto"])).settings.mode == "free"


@pytest.mark.parametrize(
    ("overrides", "mode", "stages"),
    [
        (["zero.stage=2"], "lockstep", 1),
        (["zero.stage=3"], "lockstep", 1),
        (["planner.mode=lockstep"], "lockstep", 1),
        (["parallel.pp=2"], "pipeline", 2),
        (["parallel.pp=4", "planner.mode=pipeline", "model.layers=4"], "pipeline", 4),
    ],
)
def test_auto_follows_zero_and_the_pipeline(overrides: list[str], mode: str, stages: int) -> None:
    found = Job(load(["cluster.ranks_per_node=8", *overrides])).settings
    assert (found.mode, found.stages, found.ranks) == (mode, stages, 8 // stages)


def test_ranks_are_hdp_ranks() -> None:
    degrees = ["parallel.tp=2", "parallel.pp=2", "cluster.nodes=3", "cluster.ranks_per_node=4"]
    found = Job(load(["context=4K", "capacity=2K", *degrees])).settings
    assert (found.ranks, found.costs.devices) == (3, 4)


@pytest.mark.parametrize(("ratio", "ppm"), [("auto", PPM), ("0", 0), ("1", PPM), ("0.25", 250_000)])
def test_an_offload_ratio_is_parts_per_million(ratio: str, ppm: int) -> None:
    found = Job(load([f"offload.ratio={ratio}", "cluster.host_memory=3G", "cluster.headroom=0.25"])).settings
    assert (found.offload, found.host_memory) == (ppm, 3 * 2**30 * 3 // 4)


def test_another_planner_changes_nothing_else() -> None:
    found = Job(load(["planner=naive"])).settings
    assert replace(found.by("static"), planner="naive") == found


def test_capacity_follows_the_memory_beside_the_model_states(tmp_path: Path) -> None:
    """Twice the available memory holds twice the tokens; with less memory, all tokens that fit."""
    (tmp_path / "hosts").write_text("usual slots=2\nsmall slots=1 memory=6G\nlarge slots=1 memory=20G")
    common = [f"cluster.hostfile={tmp_path / 'hosts'}", "cluster.device_memory=10G", "offload.ratio=0", "context=1000"]
    found = Job(load([*common, "capacity=1000"])).settings
    states, gib = found.costs.fixed_bytes, 2**30
    large = (usable(20 * gib) - states) / (usable(10 * gib) - states)
    assert found.capacities.tolist() == [1000, 1000, 1000, int(1000 * large)]
    full = replace(found, capacity=2**20)
    small, number = int(full.capacities[2]), np.int64
    peaks = [int(found.costs.peak_bytes(number(n), number(n))) for n in (small, small + 1)]
    assert peaks[0] <= usable(6 * gib) < peaks[1] and 1000 < small < 2**20


def test_more_memory_elsewhere_makes_no_rank_hold_less(tmp_path: Path) -> None:
    held = []
    for large in (20, 40, 80):
        hosts = tmp_path / f"{large}"
        hosts.write_text(f"large slots=2 memory={large}G\nsmall slots=2 memory=10G")
        own = Job(load([f"cluster.hostfile={hosts}"])).settings
        held.append(replace(own, capacity=2**30).capacities.tolist())
    assert held[0][2] == held[1][2] == held[2][2] > 0
    assert held[0][0] <= held[1][0] <= held[2][0]
