from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load
from engine.errors import ConfigError, MemoryFitError
from engine.job import Job
from engine.planner.checks import check_longest, check_nodes, check_planner
from engine.planner.make import plan_step
from tests.planner.samples import ints
from tests.refusals import refused


def test_a_sequence_longer_than_all_ranks_hold_is_refused(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    found = Job(load([f"cluster.hostfile={hosts}", "context=5K", "capacity=2K"])).settings
    check_longest(4096, found)
    with refused(MemoryFitError, "context"):
        check_longest(4097, found)


def test_more_ranks_of_a_hostfile_than_can_be_planned_are_refused(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("alpha slots=65536\nbeta slots=1\n")
    found = Job(load([f"cluster.hostfile={hosts}"])).settings
    with refused(ConfigError, "cluster.hostfile"):
        check_planner(found)


@pytest.mark.parametrize(("planner", "least"), [("static", 2), ("naive", 4), ("balanced", 4), ("adaptive", 4)])
def test_too_few_peers_for_the_planner_are_refused(planner: str, least: int) -> None:
    common = ["cluster.ranks_per_node=8", f"planner={planner}"]
    check_planner(Job(load([*common, f"planner.max_peers={least}"])).settings)
    with refused(ConfigError, "planner.max_peers"):
        check_planner(Job(load([*common, f"planner.max_peers={least - 1}"])).settings)


def test_a_small_world_needs_few_peers() -> None:
    check_planner(Job(load(["cluster.ranks_per_node=2", "planner=balanced", "planner.max_peers=1"])).settings)


@pytest.mark.parametrize("ratio", ["0", "auto"])
def test_a_host_too_small_for_the_states_is_not_reported_as_a_node_without_memory(tmp_path: Path, ratio: str) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2 memory=20G\n")
    keys = [f"cluster.hostfile={tmp_path / 'hosts'}", "model=1b", "dtype=bf16", "context=4K", "capacity=4K"]
    memory = ["cluster.device_memory=40G", "cluster.host_memory=2G", "optimizer.on_host=true", f"offload.ratio={ratio}"]
    own = Job(load([*keys, *memory])).settings
    assert own.host_memory < 0 < own.least_capacity
    check_nodes(own)
    with refused(MemoryFitError, "cluster.host_memory"):
        plan_step(ints(100), own)
