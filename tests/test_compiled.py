from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine import compiled

SAYS = """
from engine.compiled import when_compiling
when_compiling(lambda: print("compiles"))
from engine.planner.make import plan_step
from tests.planner.samples import ints, settings
plan_step(ints(3, 4), settings("naive"))
plan_step(ints(3, 40), settings("naive"))
"""


def test_a_change_of_any_source_leads_to_another_folder(tmp_path: Path) -> None:
    """Also of one that other files' kernels only call."""
    for name in ("cost", "planner"):
        (tmp_path / name).mkdir()
    source = tmp_path / "cost" / "times.py"
    source.write_text("a")
    before = compiled._digest(tmp_path)
    assert compiled._digest(tmp_path) == before
    source.write_text("b")
    assert compiled._digest(tmp_path) != before


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = compiled._folder([tmp_path / "file", tmp_path / "free"])
    assert folder.parent == tmp_path / "free"
    assert folder.is_dir()


def test_all_kernels_are_in_packages_whose_sources_count(pytestconfig: pytest.Config) -> None:
    engine = pytestconfig.rootpath / "engine"
    holding = {file.relative_to(engine).parts[0] for file in engine.rglob("*.py") if "@kernel" in file.read_text()}
    assert holding == set(compiled._SOURCES)
    assert not [file for file in engine.rglob("*.py") if "import njit" in file.read_text()]


def test_compiling_is_told_once_and_only_where_it_happens(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    for told in ("compiles\n", ""):
        run = subprocess.run(
            [sys.executable, "-c", SAYS],
            cwd=pytestconfig.rootpath,
            env={"PATH": "", "NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout == told
