from __future__ import annotations

import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.config.load import load
from engine.cost.model import PPM
from engine.errors import ConfigError, MemoryFitError
from engine.planner.make import plan_step
from engine.planner.settings import PlanSettings
from tests.planner.samples import ints

PROCESS = 480 << 20  # of a device of cluster=local


def test_they_come_from_the_config_and_travel() -> None:
    config = load(["cluster.ranks_per_node=3", "planner=naive", "capacity=2K", "context=6K", "planner.mode=lockstep"])
    found = PlanSettings.of(config)
    assert (found.planner, found.mode, found.ranks) == ("naive", "lockstep", 3)
    assert (found.capacity, found.context, found.device_memory) == (2048, 6144, config.cluster.device_memory - PROCESS)
    assert pickle.loads(pickle.dumps(found)) == found


def test_auto_is_free_under_zero_1() -> None:
    assert PlanSettings.of(load(["planner.mode=auto"])).mode == "free"


def test_a_context_that_the_ranks_of_a_hostfile_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Without a hostfile the door refuses it; with one only its reader knows the ranks."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    with pytest.raises(ConfigError, match="2 ranks x capacity 2K hold 4K tokens") as caught:
        PlanSettings.of(load([f"cluster.hostfile={hosts}", "context=5K", "capacity=2K"]))
    assert caught.value.problems[0].key == "context"
    told = PlanSettings.of(load([f"cluster.hostfile={hosts}", "context=5K", "capacity=2K"]), refuses=False)
    assert told.context > told.ranks * told.capacity, "but not for whoever asks what they hold"


def test_more_ranks_of_a_hostfile_than_can_be_planned_are_refused(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("alpha slots=65536\nbeta slots=1\n")
    with pytest.raises(ConfigError, match="65,537 HDP ranks are more than the 65,536 that can be planned") as caught:
        PlanSettings.of(load([f"cluster.hostfile={hosts}"]))
    assert caught.value.problems[0].key == "cluster.hostfile"


@pytest.mark.parametrize(
    ("overrides", "mode", "stages"),
    [
        (["zero.stage=2"], "lockstep", 1),
        (["zero.stage=3"], "lockstep", 1),
        (["planner.mode=lockstep"], "lockstep", 1),
        (["parallel.pp=2"], "pipeline", 2),
        (["parallel.pp=4", "planner.mode=pipeline"], "pipeline", 4),
    ],
)
def test_auto_follows_zero_and_the_pipeline(overrides: list[str], mode: str, stages: int) -> None:
    found = PlanSettings.of(load(["cluster.ranks_per_node=8", *overrides]))
    assert (found.mode, found.stages, found.ranks) == (mode, stages, 8 // stages)


def test_ranks_are_hdp_ranks() -> None:
    degrees = ["parallel.tp=2", "parallel.pp=2", "cluster.nodes=3", "cluster.ranks_per_node=4"]
    found = PlanSettings.of(load(["context=4K", "capacity=2K", *degrees]))
    assert (found.ranks, found.costs.devices) == (3, 4)


@pytest.mark.parametrize(("ratio", "ppm"), [("auto", PPM), ("0", 0), ("1", PPM), ("0.25", 250_000)])
def test_an_offload_ratio_is_parts_per_million(ratio: str, ppm: int) -> None:
    found = PlanSettings.of(load([f"offload.ratio={ratio}", "cluster.host_memory=3G"]))
    assert (found.offload, found.host_memory) == (ppm, 3 * 2**30)


def test_another_planner_changes_nothing_else() -> None:
    found = PlanSettings.of(load(["planner=naive"]))
    assert replace(found.by("static"), planner="naive") == found


def test_capacity_follows_the_memory_beside_the_model_states(tmp_path: Path) -> None:
    """Twice of what is free holds twice of the tokens; where it is less, all of them that fit."""
    (tmp_path / "hosts").write_text("usual slots=2\nsmall slots=1 memory=6G\nlarge slots=1 memory=20G")
    common = [f"cluster.hostfile={tmp_path / 'hosts'}", "cluster.device_memory=10G", "offload.ratio=0", "context=1000"]
    found = PlanSettings.of(load([*common, "capacity=1000"]))
    states, gib = found.costs.fixed_bytes, 2**30
    large = (20 * gib - PROCESS - states) / (10 * gib - PROCESS - states)
    assert found.capacities.tolist() == [1000, 1000, 1000, int(1000 * large)]
    full = replace(found, capacity=2**20)
    small, number = int(full.capacities[2]), np.int64
    peaks = [int(found.costs.peak_bytes(number(n), number(n))) for n in (small, small + 1)]
    assert peaks[0] <= 6 * gib - PROCESS < peaks[1] and 1000 < small < 2**20


def test_more_memory_elsewhere_makes_no_rank_hold_less(tmp_path: Path) -> None:
    held = []
    for large in (20, 40, 80):
        hosts = tmp_path / f"{large}"
        hosts.write_text(f"large slots=2 memory={large}G\nsmall slots=2 memory=10G")
        own = PlanSettings.of(load([f"cluster.hostfile={hosts}"]), refuses=False)
        held.append(replace(own, capacity=2**30).capacities.tolist())
    assert held[0][2] == held[1][2] == held[2][2] > 0
    assert held[0][0] <= held[1][0] <= held[2][0]


@pytest.mark.parametrize(("planner", "least"), [("static", 2), ("naive", 4), ("balanced", 4), ("adaptive", 4)])
def test_too_few_peers_for_the_planner_are_refused(planner: str, least: int) -> None:
    common = ["cluster.ranks_per_node=8", f"planner={planner}"]
    PlanSettings.of(load([*common, f"planner.max_peers={least}"]))
    with pytest.raises(ConfigError, match=f"may need {least} peers a rank") as caught:
        PlanSettings.of(load([*common, f"planner.max_peers={least - 1}"]))
    assert caught.value.problems[0].key == "planner.max_peers"


def test_a_small_world_needs_few_peers() -> None:
    PlanSettings.of(load(["cluster.ranks_per_node=2", "planner=balanced", "planner.max_peers=1"]))


def test_a_ratio_that_the_host_has_no_room_for_is_refused_with_the_number() -> None:
    keys = ["recipe=llama7b-2m", "offload.ratio=0.5"]
    costs = PlanSettings.of(load(keys)).costs
    needs = int(costs.host_bytes(np.int64(8192), PPM // 2))
    assert PlanSettings.of(load([*keys, f"cluster.host_memory={needs}"])).offload == PPM // 2
    with pytest.raises(
        MemoryFitError, match=r"0\.5 of a micro-batch of 8K tokens puts 13\.[0-9]+ GiB on the host"
    ) as caught:
        PlanSettings.of(load([*keys, f"cluster.host_memory={needs - 1}"]))
    (problem,) = caught.value.problems
    puts, has = re.findall(r"[0-9.]+ GiB", problem.message)
    assert puts != has, "a byte is missing, and it is seen"
    assert problem.key == "offload.ratio" and "offload.ratio=auto" in str(problem.hint)
    assert PlanSettings.of(load(["recipe=llama7b-2m", "cluster.host_memory=1GiB"])).offload == PPM, "auto takes less"


def test_model_states_on_the_host_leave_less_for_a_ratio() -> None:
    keys = ["recipe=llama7b-2m", "zero.stage=3", "optimizer.on_host=true", "offload.ratio=1", "cluster.nodes=4"]
    with pytest.raises(
        MemoryFitError, match=r"puts 27\.3 GiB on the host beside 4\.1 GiB of model states, 31\.4 GiB in all"
    ):
        PlanSettings.of(load([*keys, "context=64K", "cluster.host_memory=28GiB"]))


@pytest.mark.parametrize("ratio", ["0", "auto"])
def test_a_host_without_room_for_the_states_is_not_told_as_a_node_that_holds_nothing(
    tmp_path: Path, ratio: str
) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2 memory=20G\n")
    keys = [f"cluster.hostfile={tmp_path / 'hosts'}", "model=1b", "dtype=bf16", "context=4K", "capacity=4K"]
    memory = ["cluster.device_memory=40G", "cluster.host_memory=2G", "optimizer.on_host=true", f"offload.ratio={ratio}"]
    own = PlanSettings.of(load([*keys, *memory]))
    assert own.host_memory < 0 < own.least_capacity
    with pytest.raises(MemoryFitError, match="the model states on the host need"):
        plan_step(ints(100), own)
