from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from engine.config.load import load
from engine.doctor import software
from engine.doctor.software import Software
from tests.doctor.planted import installed


def test_the_ranges_are_those_of_the_package_without_its_extras() -> None:
    found = software.required()
    assert {"torch", "deepspeed", "numpy"} <= set(found) and not {"pytest", "flash-attn"} & set(found)
    assert not found["torch"].contains("2.0.0")


@pytest.mark.parametrize(
    ("version", "state"), [("2.4.1", "failed"), ("2.99.0+cu130", None), ("2.99.0a0+git12", None), ("3", None)]
)
def test_a_package_is_compared_with_its_range(
    version: str, state: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds of one's own have versions such as 2.99.0a0+git12."""
    monkeypatch.setattr(software, "required", lambda: {"torch": SpecifierSet(">=2.11")})
    monkeypatch.syspath_prepend(installed(tmp_path, "torch", version))
    found = software.package("torch")
    assert (found and found.state) == state
    if found:
        assert found.value == version and "torch>=2.11 is needed" in found.message


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "required", lambda: {"torch": SpecifierSet(""), "no-such-package": SpecifierSet("")})
    found = software.packages()
    assert (found.state, found.message) == ("failed", "no-such-package is not installed")


def test_sources_that_are_not_installed_have_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    for name in ("version", "requires", "metadata"):
        monkeypatch.setattr(metadata, name, missing)
    assert software.required() == {}
    assert software.packages().state == "skipped"
    assert software.python().state == "ok"
    assert software.bytescale(Software("3.11", "abc", {})).state == "warning"


def test_the_digest_changes_with_any_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts with other sources would make other plans."""
    monkeypatch.setattr(software, "_HOME", tmp_path)
    (tmp_path / "engine" / "planner").mkdir(parents=True)
    (tmp_path / "engine" / "planner" / "make.py").write_text("one")
    first = Software.here().code
    (tmp_path / "engine" / "planner" / "make.py").write_text("two")
    second = Software.here().code
    (tmp_path / "engine" / "planner" / "make.py").rename(tmp_path / "engine" / "planner" / "made.py")
    third = Software.here().code
    (tmp_path / "engine" / "planner" / "made.pyc").write_text("compiled")
    assert len({first, second, third}) == 3 and Software.here().code == third
    assert Software.here().python == ".".join(map(str, sys.version_info[:3]))


def test_ray_is_looked_at_if_the_config_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, used = load([]).data, load(["data.runtime=ray"]).data
    assert software.ray(plain, 1).state == "skipped" and software.extras(plain) == []
    monkeypatch.setattr("engine.remote.checks.version", lambda: "2.60.0")
    assert software.ray(used, 1).state == "ok"
    monkeypatch.setattr("engine.remote.checks.version", lambda: None)
    missing = software.ray(used, 1)
    assert missing.state == "failed" and "pip install ray" in str(missing.hint)
    assert "ray" in Software.here(*software.extras(used)).packages and "ray" not in Software.here().packages
