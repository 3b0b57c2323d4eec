"""The resolved text is what ranks train by: it gives the same config back, and names what differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from engine.config import versions
from engine.config.load import load, recipes
from engine.config.resolved import diff, digest, read_resolved, resolved_yaml
from engine.errors import ConfigError
from tests.permissions import locked_out
from tests.refusals import refused

SMALL = ["optimizer.lr=1e-7", "optimizer.eps=1e-12", "run.out=\"ä: #1, 'x'\"", "data.pattern=null_"]


@pytest.mark.parametrize("overrides", [[f"recipe={name}"] for name in recipes()] + [SMALL])
def test_round_trip(overrides: list[str], tmp_path: Path) -> None:
    config = load(overrides)
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(config), encoding="utf-8")
    again = read_resolved(tmp_path / "resolved.yaml")
    assert again == config
    assert digest(again) == digest(config)


def test_digest_tells_configs_apart() -> None:
    assert digest(load(["run.seed=1"])) != digest(load(["run.seed=2"]))


def test_diff_names_each_key_that_differs() -> None:
    old, new = load([]), load(["optimizer.lr=1e-3", "run.steps=7", "planner=static"])
    assert diff(old, new) == [
        "run.steps: 600 -> 7",
        "planner.name: adaptive -> static",
        "optimizer.lr: 0.004 -> 0.001",
    ]
    assert diff(old, old) == []


@pytest.mark.parametrize("text", [b"\xff\xfe", b"a: [1", b"", b"- 1", b"context: 3"])
def test_a_damaged_text_is_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        read_resolved(path)
    assert {str(problem.key).removesuffix(":1") for problem in caught.value.problems} == {str(path)}


def test_a_text_that_may_not_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    path.write_text(resolved_yaml(load([])))
    with locked_out(path), pytest.raises(PermissionError):
        read_resolved(path)


def test_a_missing_text_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, tmp_path / "resolved.yaml"):
        read_resolved(tmp_path / "resolved.yaml")


def test_a_config_of_the_first_format_has_the_values_that_it_had(tmp_path: Path) -> None:
    """It has no number, and keys that came later are not in it."""
    values = yaml.safe_load(resolved_yaml(load(["model.family=mixtral", "model.experts=4"])))
    del values["format"], values["data"]["separator"], values["cluster"]["headroom"], values["model"]["family"]
    path = tmp_path / "resolved.yaml"
    path.write_text(yaml.safe_dump(values))
    config = read_resolved(path)
    assert (config.data.separator, config.cluster.headroom, config.model.family) == (None, 0, "mixtral")
    assert load([f"recipe={path}"]) == config, "a saved config is a recipe too"


def test_a_config_of_this_format_that_lacks_a_key_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    path.write_text(resolved_yaml(load([])).replace("  separator: null\n", ""))
    with refused(ConfigError, path) as problems:
        read_resolved(path)
    assert problems[0].message.startswith("data.separator: ")


@pytest.mark.parametrize("number", ["99", "0", "-1", "two", "1.5", "true", "null"])
def test_a_format_that_is_newer_or_never_was_is_refused_with_its_number(number: str, tmp_path: Path) -> None:
    path = tmp_path / "resolved.yaml"
    text = resolved_yaml(load([])).replace(f"format: {versions.newest()}\n", f"format: {number}\nnew_key: 1\n", 1)
    path.write_text(text)
    for read in (lambda: read_resolved(path), lambda: load([f"recipe={path}"])):
        with refused(ConfigError) as problems:
            read()
        shown = {"true": "True", "null": "None"}.get(number, number)
        assert str(problems[0].key).startswith(str(path)) and shown in problems[0].message
