from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from engine.config.load import load
from engine.errors import ConfigError
from engine.planner.settings import PlanSettings


def test_they_come_from_the_config_and_travel() -> None:
    config = load(["cluster.ranks_per_node=3", "planner=naive", "capacity=2K", "context=6K", "planner.mode=lockstep"])
    found = PlanSettings.of(config)
    assert (found.planner, found.mode, found.ranks) == ("naive", "lockstep", 3)
    assert (found.capacity, found.context, found.device_memory) == (2048, 6144, config.cluster.device_memory)
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


@pytest.mark.parametrize(("planner", "least"), [("static", 2), ("naive", 4), ("balanced", 4)])
def test_too_few_peers_for_the_planner_are_refused(planner: str, least: int) -> None:
    common = ["cluster.ranks_per_node=8", f"planner={planner}"]
    PlanSettings.of(load([*common, f"planner.max_peers={least}"]))
    with pytest.raises(ConfigError, match=f"may need {least} peers a rank") as caught:
        PlanSettings.of(load([*common, f"planner.max_peers={least - 1}"]))
    assert caught.value.problems[0].key == "planner.max_peers"


def test_a_small_world_needs_few_peers() -> None:
    PlanSettings.of(load(["cluster.ranks_per_node=2", "planner=balanced", "planner.max_peers=1"]))
