"""What contributors and CI use agrees with the Makefile, pyproject.toml and the commands."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from tests.root import ROOT

TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_newest_entry_of_the_changelog_is_the_version_of_the_package() -> None:
    version = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version is not None and newest is not None and newest[1] == version[1]


def test_the_workflow_runs_targets_of_the_makefile() -> None:
    workflow = read(".github/workflows/ci.yml")
    job = workflow["jobs"]["make"]
    nightly, others = map(json.loads, re.findall(r"'(\[.*?\])'", job["strategy"]["matrix"]["target"]))
    assert nightly == ["nightly"] and others == ["check", "test"] and {*nightly, *others} <= TARGETS
    assert "schedule" in workflow[True], "which YAML makes of `on`"
    assert "make ${{ matrix.target }}" in [step.get("run") for step in job["steps"]]


def test_each_marker_has_a_tier() -> None:
    """`pytest -m` takes any name."""
    settings = re.search(r"^markers = \[$(.*?)^\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert settings is not None
    markers = set(re.findall(r'"(\w+): ', settings[1]))
    assert set(re.findall(r"^\| `(\w+)` \|", CONTRIBUTING.split("## A change")[0], re.MULTILINE)) == markers
    chosen = re.findall(r'-m "(.*)"', (ROOT / "Makefile").read_text())
    assert set(re.findall(r"\w+", " ".join(chosen))) - {"not", "and"} == markers


def test_hooks_run_the_installed_tools() -> None:
    hooks = read(".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert [hook["entry"].split()[0] for hook in hooks] == [".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy"]


def test_the_form_for_bugs_asks_for_the_report_of_the_doctor() -> None:
    body = read(".github/ISSUE_TEMPLATE/bug.yml")["body"]
    (doctor,) = [part for part in body if part["id"] == "doctor"]
    assert doctor["validations"]["required"] and "bytescale doctor --json" in doctor["attributes"]["label"]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make (\w+)", CONTRIBUTING))))
def test_targets_that_contributors_are_told_exist(target: str) -> None:
    assert target in TARGETS


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/RESULTS.md", *(ROOT / "docs").rglob("*.md")]
PLACES = r"`((?:engine|recipes|tests|docs|bytescale_cli)/[\w./-]*)`|(benchmarks/[\w/]+\.py)"


def test_places_that_pages_name_exist() -> None:
    named = {(page.name, *found) for page in PAGES for found in re.findall(PLACES, page.read_text())}
    assert len(named) >= 100
    assert {(page, file or script) for page, file, script in named if not (ROOT / (file or script)).exists()} == set()
