"""The door as a whole: what wins over what, and that all mistakes come at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.load import load, recipes
from engine.errors import ConfigError, ExitCode, Problem


def refused(*overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    return caught.value.problems


def test_without_overrides_it_is_the_quickstart() -> None:
    assert load([]) == load(["recipe=quickstart"])


def test_recipe_wins_over_groups_and_command_line_over_the_recipe() -> None:
    assert load(["recipe=llama7b-256k"]).model.name == "llama7b"
    assert load(["recipe=llama7b-256k", "model=tiny", "parallel.tp=1"]).model.name == "tiny"
    assert load(["recipe=llama7b-256k", "model=tiny", "parallel.tp=1"]).cluster.nodes == 128
    assert load(["cluster.nodes=4", "recipe=llama7b-256k"]).cluster.nodes == 4


@pytest.mark.parametrize("recipe", recipes())
def test_every_recipe_loads(recipe: str) -> None:
    config = load([f"recipe={recipe}"])
    assert config.recipe == recipe
    assert config.run.out == f"runs/{recipe}"


def test_lengths_and_sizes_are_read_as_people_write_them() -> None:
    config = load(["context=3K", "capacity=1.5K", "data.validation_tokens=1M", "cluster.device_memory=80GiB"])
    assert (config.context, config.capacity, config.data.validation_tokens) == (3072, 1536, 1 << 20)
    assert config.cluster.device_memory == 80 << 30


def test_the_last_of_two_equal_keys_counts() -> None:
    assert load(["run.steps=3", "run.steps=4"]).run.steps == 4


@pytest.mark.parametrize("text", ["1e3", "1E3", "1000.0", "1e0003"])
def test_a_number_is_quoted_as_it_was_written(text: str, tmp_path: Path) -> None:
    """On the command line and in a file; 1e9 also where it is out of bounds."""
    (problem,) = refused(f"run.steps={text}")
    assert (problem.message, problem.hint) == (f"must be a whole number, not {text}", "write run.steps=1000")
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults: quickstart\nrun:\n  steps: {text}\n")
    (problem,) = refused(f"recipe={mine}")
    assert (problem.key, problem.message) == (f"{mine}:3", f"run.steps: must be a whole number, not {text}")


def test_numbers_out_of_bounds_are_quoted_as_they_were_written() -> None:
    """What a reference to another key gives is shown, not the reference."""
    assert refused("run.steps=1e12")[0].message == "must be at most 99999999, not 1e12"
    assert refused("optimizer.lr=1e31")[0].message == "must be at most 1e+30, not 1e31"
    assert refused("optimizer.lr=-0.50")[0].message == "must be more than 0, not -0.50"
    assert refused("model.layers=${optimizer.eps}")[0].message == "must be a whole number, not 1e-08"


def test_all_mistakes_are_reported_together() -> None:
    problems = refused("recipe=quikstart", "run.step=3", "run.steps=0", "optimizer.lr=fast", "planner=adaptiv", "+a=1")
    assert {problem.key for problem in problems} == {
        "recipe", "run.step", "run.steps", "optimizer.lr", "planner", "+a=1"
    }  # fmt: skip
    assert all(problem.hint for problem in problems)


def test_rules_between_keys_stay_silent_while_a_key_is_wrong() -> None:
    """A mistyped recipe leaves the quickstart's capacity, which the user never meant."""
    assert [problem.key for problem in refused("recipe=llama7b-256", "context=128K")] == ["recipe"]


def test_rules_are_judged_where_all_that_they_read_is_right() -> None:
    """Mistakes come at once, and none is about a value that is told to be wrong."""
    wrong = ["context=0", "model.layers=x", "model.kv_heads=3", "model.heads=4", "model.rope.kind=linear"]
    keys = [problem.key for problem in refused(*wrong, "model.rope.factor=x", "zero.stage=7", "optimizer.betas=[2,3]")]
    assert sorted(map(str, keys)) == [
        "context", "model.kv_heads", "model.layers", "model.rope.factor", "optimizer.betas", "zero.stage"
    ]  # fmt: skip
    assert {problem.key for problem in refused("data=folder", "offload.ratio=3")} == {"data.path", "offload.ratio"}


def test_a_config_error_is_a_usage_error() -> None:
    assert ConfigError("x").code == ExitCode.USAGE


def test_reading_a_resolved_text_imports_no_hydra() -> None:
    """Ranks import this module; Hydra is a process-wide singleton and slow to load."""
    code = "import sys, engine.config.load; sys.exit('hydra' in sys.modules or 'omegaconf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
