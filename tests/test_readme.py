"""Paths that the README and docs/commands.md name exist, and their commands have valid configs."""

from __future__ import annotations

import re
import shlex

import pytest

from engine.config.load import load
from tests.root import ROOT

PAGES = [(ROOT / name).read_text() for name in ("README.md", "docs/commands.md")]
TEXT = "\n".join(PAGES)
PATHS = re.findall(r"[`(]((?:engine|recipes|tests|benchmarks|docs|hostfiles)/[^`)]*)[`)]", TEXT)
LINES = [line.removeprefix(".venv/bin/") for line in TEXT.splitlines()]
COMMANDS = [line.split("  #")[0].strip() for line in LINES if line.startswith("bytescale ")]


def test_there_is_something_to_check() -> None:
    assert len(PATHS) >= 20
    assert len(COMMANDS) >= 20
    assert all("bytescale " in page for page in PAGES)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_composes(command: str) -> None:
    words = shlex.split(command)
    swept = [words[at + 1] for at, word in enumerate(words) if word == "--sweep"]
    overrides = [word for word in words if "=" in word and word not in swept]
    assert load(overrides).recipe
    for key, values in (text.split("=") for text in swept):
        for value in values.split(","):
            assert load([*overrides, f"{key}={value}"])
