"""The door as a whole: what wins over what, and that all mistakes come at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.load import load, recipes
from engine.errors import ConfigError, ExitCode
from tests.refusals import refused


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


def test_a_number_is_quoted_as_it_was_written(tmp_path: Path) -> None:
    """On the command line and in a file."""
    mine = tmp_path / "mine.yaml"
    for text in ("1E3", "1000.0", "1e0003"):
        mine.write_text(f"defaults: quickstart\nrun:\n  steps: {text}\n")
        for override, key in ((f"run.steps={text}", "run.steps"), (f"recipe={mine}", f"{mine}:3")):
            with refused(ConfigError, key) as problems:
                load([override])
            assert problems[0].message.endswith(f"not {text}")


def test_all_mistakes_are_reported_together() -> None:
    keys = ("recipe", "run.step", "planner", "+a=1", "run.steps", "optimizer.lr")
    with refused(ConfigError, *keys):
        load(["recipe=quikstart", "run.step=3", "run.steps=0", "optimizer.lr=fast", "planner=adaptiv", "+a=1"])


def test_rules_between_keys_stay_silent_while_a_key_is_wrong() -> None:
    """A mistyped recipe leaves the quickstart's capacity, which the user never meant."""
    with refused(ConfigError, "recipe"):
        load(["recipe=llama7b-256", "context=128K"])


def test_rules_are_judged_where_all_that_they_read_is_right() -> None:
    """Mistakes come at once, and none is about a value that is told to be wrong."""
    wrong = ["context=0", "model.layers=x", "model.kv_heads=3", "model.heads=4", "model.rope.kind=linear"]
    keys = ("context", "model.layers", "model.rope.factor", "zero.stage", "model.kv_heads", "optimizer.betas")
    with refused(ConfigError, *keys):
        load([*wrong, "model.rope.factor=x", "zero.stage=7", "optimizer.betas=[2,3]"])
    with refused(ConfigError, "data.path", "offload.ratio"):
        load(["data=folder", "offload.ratio=3"])


def test_a_config_error_is_a_usage_error() -> None:
    assert ConfigError("x").code == ExitCode.USAGE


def test_reading_a_resolved_text_imports_no_hydra() -> None:
    """Ranks import this module; Hydra is a process-wide singleton and slow to load."""
    code = "import sys, engine.config.load; sys.exit('hydra' in sys.modules or 'omegaconf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
