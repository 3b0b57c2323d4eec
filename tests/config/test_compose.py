"""Hydra's part: what stays of it, and what it may not say."""

from __future__ import annotations

from pathlib import Path

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from engine.config import tree
from engine.config.compose import compose, layers
from engine.config.own import OwnRecipe
from engine.errors import ConfigError
from tests.refusals import refused


def test_values_are_plain_and_resolved() -> None:
    values = compose(["run.steps=7"])
    assert type(values["run"]) is dict
    assert values["run"]["steps"] == 7
    assert values["run"]["out"] == "runs/quickstart"


def test_a_value_that_must_be_set_stays_marked() -> None:
    assert compose(["data=folder"])["data"]["path"] == "???"


def test_nothing_of_hydra_is_left_behind() -> None:
    compose([])
    assert not GlobalHydra.instance().is_initialized()


def test_an_unknown_reference_is_refused() -> None:
    with refused(ConfigError, "run.out=${nowhere}"):
        compose(["run.steps=3", "run.out=${nowhere}"])


def test_nothing_of_an_own_recipe_is_left_behind() -> None:
    own = OwnRecipe("own-0", Path("mine.yaml"), {"recipe": "mine", "run": {"seed": 5}}, {}, {})
    assert compose([], [own])["run"]["seed"] == 5
    assert compose([])["run"]["seed"] == 1234
    assert "recipe" not in ConfigStore.instance().repo


def test_layers_are_in_the_order_in_which_they_are_merged() -> None:
    found = layers(["recipe=llama7b-2m", "model=tiny"])
    assert found[-2:] == [("recipe/base/llama7b", ""), ("recipe/llama7b-2m", "")]
    assert found[:3] == [("any_model", ""), ("model/rope/none", "model.rope"), ("model/tiny", "model")]


def test_a_variable_that_looks_like_a_secret_is_not_copied_into_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe of somebody else could name one; the run folder that is shared later would have its value."""
    monkeypatch.setenv("MY_TEXTS", "texts")
    assert compose(["data.path=${oc.env:MY_TEXTS}"])["data"]["path"] == "texts"
    for name in ("MY_OTHERS", "MY_TOKENIZERS"):
        assert compose([f"data.path=${{oc.env:{name},here}}"])["data"]["path"] == "here"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    with refused(ConfigError, "${oc.env:AWS_SECRET_ACCESS_KEY}"):
        compose(["data.path=x-${oc.env:AWS_SECRET_ACCESS_KEY}"])


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["recipe=mixtral8x22b-2m-paper", "cluster=b200x8", "planner=naive", "memory=zero3_recompute"],
        ["run.seed=5", "recipe=llama7b-2m", "run.seed=6", "model=tiny", "run.out=${recipe}/${run.seed}"],
        ["data=jsonl", 'data.path="/a,b{c}"', "optimizer.betas=[0.1,0.2]", "run.weights=null"],
        ["data.sources=null", "++data.sources={a: {path: x}}", "++data.sources.b.path=y"],
    ],
)
def test_values_that_are_applied_afterwards_are_those_of_hydra(overrides: list[str]) -> None:
    """The composition of the choices is kept, and nothing that was set before may stay in it."""
    with hydra.initialize_config_dir(str(tree.folder()), version_base="1.3"):
        expected = OmegaConf.to_container(hydra.compose("config", overrides=overrides), resolve=True)
    compose([*overrides, "run.steps=987", "optimizer.betas=[0.5,0.5]"])
    assert repr(compose(overrides)) == repr(expected), "with the same order and types"
