"""Warnings about plans that waste ranks or memory; none about plans that do not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bytescale_cli.main import run
from engine.config.load import load
from engine.config.schema import Config
from engine.job import Job
from engine.planner.make import plan_step
from engine.planner.settings import PlanSettings
from engine.simulator.facts import Facts, facts
from engine.simulator.hollow import empty_capacity, low_balance, small_corpus

SMALL = ["lengths=byted", "lengths.max=8K", "batch_tokens=64K", "context=8K", "capacity=2K", "cluster.ranks_per_node=4"]


def planned(*keys: str, lengths: list[int]) -> tuple[Config, PlanSettings, Facts]:
    config = load([*SMALL, *keys])
    settings = Job(config).settings
    return config, settings, facts(plan_step(np.array(lengths), settings), settings)


def test_ranks_that_wait_for_one_sequence() -> None:
    """A context on the fewest ranks that hold it, and nothing else to do."""
    config, _, found = planned("capacity=8K", "planner=naive", "offload.ratio=0", lengths=[8192])
    (low,) = low_balance(config, float(found["balance"]))
    assert (low.code, low.key) == ("balance", "batch_tokens") and low.hint
    config, _, found = planned(lengths=[2048] * 32)
    assert low_balance(config, float(found["balance"])) == [] and low_balance(config, 0.5) == []


def test_a_capacity_of_which_most_is_empty() -> None:
    config, settings, found = planned("capacity=16K", "batch_tokens=16K", lengths=[1024] * 16)
    assert found["largest_micro_batch"] == 4096
    (empty,) = empty_capacity(config, settings.ranks, 4096)
    assert (empty.code, empty.key) == ("empty_capacity", "capacity") and "capacity=4K" in empty.hint
    assert empty_capacity(config, settings.ranks, 8192) == []
    # Half of the context must fit each of two ranks, whatever the step.
    config, settings, found = planned("cluster.ranks_per_node=2", "capacity=4K", "batch_tokens=2K", lengths=[1024] * 2)
    assert found["largest_micro_batch"] == 1024 and empty_capacity(config, settings.ranks, 1024) == []


def test_a_corpus_that_is_smaller_than_a_step() -> None:
    config = load(SMALL)
    assert [one.code for one in small_corpus(config, 64 * 1024 - 1)] == ["small_corpus"]
    assert small_corpus(config, 64 * 1024) == small_corpus(config, None) == []


@pytest.mark.parametrize("command", ["plan", "simulate --no-tuned", "profile-data"])
def test_commands_warn(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("900\n" * 8)
    assert run([*command.split(), *SMALL, "lengths=file", f"lengths.path={file}", "--json"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)["warnings"]
    assert [one["code"] for one in found] == ["small_corpus"]
    assert found[0]["key"] == "batch_tokens" and "7,200" in found[0]["message"] and found[0]["hint"]
    assert f"warning: batch_tokens: {found[0]['message']}" in captured.err
