"""`transform` as a user writes it. The steps themselves are in tests/data/transforms/."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load
from engine.config.resolved import read_resolved, resolved_yaml
from engine.config.sources import source_configs
from engine.errors import ConfigError
from tests.refusals import refused

DROP = {"drop": {"shorter": 64}}


def test_steps_are_written_for_all_sources_or_for_one(tmp_path: Path) -> None:
    """A token file has no transform but its own."""
    web, code = "data.sources.web.path=web", "data.sources.code={path: code, transform: [{truncate: {tokens: 4K}}]}"
    ids = "data.sources.ids={path: ids, format: tokens}"
    mix = "data.mix={web: 1, code: 1, ids: 1}"
    config = load(["data=jsonl", web, code, ids, mix, "data.transform=[{drop: {shorter: 64}}]"])
    found = {name: one.transform for name, one in source_configs(config.data).items()}
    assert found == {"web": (DROP,), "code": ({"truncate": {"tokens": 4096}},), "ids": ()}
    (tmp_path / "resolved.yaml").write_text(resolved_yaml(config))
    assert read_resolved(tmp_path / "resolved.yaml") == config


def test_steps_may_be_in_a_file_of_a_recipe(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("defaults: [quickstart]\ndata:\n  transform:\n  - split: {tokens: 2K}\n  - drop: {shorter: 64}\n")
    assert load([f"recipe={own}"]).data.transform == ({"split": {"tokens": 2048}}, DROP)


@pytest.mark.parametrize(
    "steps",
    [
        "[{dorp: {shorter: 64}}]",
        "[drop]",
        "[{}]",
        "[{drop: 3}]",
        "[{drop: {}}]",
        "[{drop: {short: 3}}]",
        "[{drop: {shorter: 9, longer: 8}}]",
        "[{truncate: {}}]",
        "[{truncate: {tokens: 0}}]",
        "[{truncate: {tokens: many}}]",
        "[{split: {tokens: 4K, at: lines}}]",
        "[{truncate: {tokens: 4K}}, {split: {tokens: 1K}}]",
        "[{chat: {}}, {split: {tokens: 1K}}]",
        "[{chat: {}}, {chat: {system: a}}]",
        "[{truncate: {tokens: 4K}}, {chat: {}}]",
        "[{chat: {system: ''}}]",
        "[{chat: {template: chatml.jinja}}]",
        "[{chat: {user: question, assistant: answer}}]",
        "[{chat: {systm: a}}]",
    ],
)
def test_a_mistake_in_a_step_is_refused(steps: str) -> None:
    with refused(ConfigError, "data.transform"):
        load(["data=jsonl", "data.path=a", f"data.transform={steps}"])
    with refused(ConfigError, "data.sources.a.transform"):
        load(["data=jsonl", f"data.sources={{a: {{path: a, transform: {steps}}}}}"])


def test_a_token_file_cannot_be_transformed() -> None:
    with refused(ConfigError, "data.transform"):
        load(["data=tokens", "data.path=a", "data.transform=[{drop: {shorter: 64}}]"])
    with refused(ConfigError, "data.sources.a.transform"):
        load(["data=jsonl", "data.sources.a={path: a, format: tokens, transform: [{drop: {shorter: 64}}]}"])
