"""One answer to "does it fit?", whichever command asks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bytescale_cli.main import run
from engine.config.load import load
from engine.fit.check import fit_error
from engine.fit.largest import largest_capacity
from engine.fit.problem import fit_problem
from engine.planner.settings import PlanSettings
from engine.units import PPM

LENGTHS = ["lengths=lognormal", "batch_tokens=8K"]


def problem(*keys: str) -> tuple[str, str] | None:
    """Key and message of what does not fit, if anything."""
    config = load([*keys])
    found = fit_problem(config, PlanSettings.of(config))
    return None if found is None else (str(found.key), found.message)


@pytest.mark.parametrize("command", ["estimate-memory", "plan", "simulate"])
def test_what_no_planner_supports_is_refused_whichever_command_asks(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "recipe=llama7b-256k", "planner.max_peers=1"]) == 2
    assert "error: planner.max_peers: the " in capsys.readouterr().err


def test_a_context_that_the_ranks_do_not_hold_does_not_fit() -> None:
    assert problem("context=2K") is None
    found = problem("context=2049")
    assert found == ("context", "a sequence of 2049 tokens does not fit: 2 ranks x capacity 1K = 2K")


def test_a_ratio_that_the_host_has_no_memory_for_does_not_fit() -> None:
    keys = ["recipe=llama7b-2m", "offload.ratio=0.5"]
    needs = int(PlanSettings.of(load(keys)).costs.host_bytes(np.int64(8192), PPM // 2))
    assert problem(*keys, f"cluster.host_memory={needs}") is None
    found = problem(*keys, f"cluster.host_memory={needs - 1}")
    assert found is not None and found[0] == "offload.ratio"
    assert re.match(r"offloading 0\.5 of a micro-batch of 8K tokens puts 13\.[0-9]+ GiB on the host", found[1])
    puts, has = re.findall(r"[0-9.]+ GiB", found[1])
    assert puts != has, "one byte is missing, and the message shows it"
    assert problem("recipe=llama7b-2m", "cluster.host_memory=1GiB") is None, "auto uses less"


def test_model_states_on_the_host_leave_less_for_a_ratio() -> None:
    keys = ["recipe=llama7b-2m", "zero.stage=3", "optimizer.on_host=true", "offload.ratio=1", "cluster.nodes=4"]
    found = problem(*keys, "context=64K", "cluster.host_memory=28GiB")
    assert found is not None
    assert "puts 27.3 GiB on the host beside 4.1 GiB of model states, 31.4 GiB in all" in found[1]


def test_the_capacity_comes_before_the_context() -> None:
    """A context that the ranks could hold only with a capacity that does not fit either."""
    found = problem("recipe=llama7b-2m", "cluster.nodes=1", "offload.ratio=0", "capacity=64K")
    assert found is not None and found[0] == "cluster.device_memory"


def test_the_error_has_suggestions_in_its_hint_and_in_its_json() -> None:
    config = load(["context=8K"])
    error = fit_error(config, PlanSettings.of(config))
    assert error is not None and error.code == 10
    *hints, shorter = str(error.problems[0].hint).split("; or ")
    assert [way["set"] for way in error.found["ways"]] == hints and shorter.startswith("context=")


@pytest.mark.parametrize(
    "keys",
    [
        ["context=16K"],
        ["cluster.device_memory=490M"],
        ["capacity=1G", "context=1G", "offload.ratio=0"],
        ["model.layers=8", "offload.ratio=1", "cluster.host_memory=1"],
    ],
    ids=" ".join,
)
def test_all_commands_give_one_answer(keys: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same message, key, hint and exit code 10."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("some words\n" * 2000, encoding="utf-8")
    said = set()
    for command in (
        "plan",
        "simulate",
        "estimate-memory",
        "estimate-memory --fit",
        "profile-data --sample 100",
        "train",
    ):
        where = [f"run.out={tmp_path / 'run'}", f"data.path={tmp_path / 'data'}"] if command == "train" else []
        assert run([*command.split(), *LENGTHS, *keys, *where, "--json"]) == 10, command
        error = json.loads(capsys.readouterr().out)["error"]
        said.add((error["code"], error["key"], error["message"]))
    assert len(said) == 1


@pytest.mark.parametrize("keys", [["recipe=llama3-8b-256k", "cluster.nodes=2", "capacity=32K"], ["recipe=llama7b-2m"]])
def test_the_largest_capacity_is_the_same_in_all_commands(keys: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    settings = PlanSettings.of(load(keys))
    largest, plain = largest_capacity(settings), largest_capacity(settings.without_offload())
    assert run(["estimate-memory", *keys, "--fit", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["fit"]["capacity"], answer["fit"]["capacity_without_offload"]) == (largest, plain)
    assert answer["memory"]["tokens"] == settings.capacity < answer["fullest"]["tokens"]
    assert run(["profile-data", *keys, "--sample", "100", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["largest_capacity"] == largest and data["fits"] and data["suggested_capacity"] <= largest
