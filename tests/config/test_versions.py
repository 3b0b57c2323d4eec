"""Runs outlive changes of the schema: keys that are added, and keys that are gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import keys, versions
from engine.config.load import load
from engine.config.resolved import upgraded
from engine.config.versions import Change
from engine.errors import ConfigError
from tests.refusals import refused


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> dict[int, Change]:
    """A copy of the table, in use during the test."""
    table = dict(versions.CHANGES)
    monkeypatch.setattr(versions, "CHANGES", table)
    return table


def test_every_row_is_of_a_key_that_exists_or_is_gone() -> None:
    rows = [key for change in versions.CHANGES.values() for key in change.added]
    lost = {key for change in versions.CHANGES.values() for key in change.gone}
    assert list(versions.CHANGES) == sorted(versions.CHANGES) and min(versions.CHANGES) > 1
    assert len(rows) == len(set(rows)) and set(rows) - lost <= set(keys.leaves())
    assert not lost & set(keys.leaves())


def test_a_value_may_depend_on_older_ones(changed: dict[int, Change]) -> None:
    """On those of the next format too, in the order of formats."""
    changed[3] = Change(added={"model.kind": lambda old: "many" if old["model.experts"] > 1 else "one"})
    changed[4] = Change(added={"model.part": lambda old: old["model.hidden"] // old["model.heads"]})
    changed[5] = Change(added={"fp8.kind": lambda old: f"{old['model.kind']}-{old['model.part']}"})
    values = load(["model.family=mixtral", "model.experts=4"]).model_dump(mode="json")
    new = upgraded(values, "file")
    assert (new["model"]["kind"], new["model"]["part"], new["fp8"]) == ("many", 16, {"kind": "many-16"})
    assert upgraded(values | {"format": 4}, "file")["model"].keys() == values["model"].keys()
    assert "kind" not in values["model"], "the values given stay as they are"


@pytest.mark.parametrize("model", [{}, {"experts": "many"}, 3, None, [1]])
def test_a_value_that_depends_on_damaged_ones_is_left_out(changed: dict[int, Change], model: Any) -> None:
    changed.clear()
    changed[3] = Change(added={"model.kind": lambda old: "many" if old["model.experts"] > 1 else "one"})
    assert upgraded({"model": model, "format": 2}, "file")["model"] == model


def test_a_key_that_is_gone_is_dropped_from_older_configs_alone(changed: dict[int, Change]) -> None:
    """What replaced it may be computed from it."""
    last = versions.newest()
    changed[last + 1] = Change(
        added={"model.rope_theta": lambda old: 10.0 ** old["model.rope.log"]},
        gone={"model.rope.log": "model.rope_theta=10**LOG", "old.a": "run.steps"},
    )
    values = {"model": {"rope": {"log": 4, "kind": "none"}}, "old": {"a": 1}, "data": {"sources": {}}, "format": last}
    new = upgraded(values, "file")
    assert new == {"model": {"rope": {"kind": "none"}, "rope_theta": 1e4}, "data": {"sources": {}}}
    values["format"] = last + 1
    assert upgraded(values, "file")["model"]["rope"]["log"] == 4


def test_a_user_is_told_what_replaced_a_key(changed: dict[int, Change], tmp_path: Path) -> None:
    changed[9] = Change(gone={"data.workers": "data.loaders"})
    with refused(ConfigError, "data.workers") as problems:
        load(["data.workers=3"])
    assert "data.loaders" in str(problems[0].hint)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: quickstart\ndata:\n  workers: 3\n")
    with refused(ConfigError, f"{recipe}:3"):
        load([f"recipe={recipe}"])
