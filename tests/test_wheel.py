"""A built wheel carries recipes and hostfiles, and works from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("bytescale_cli", "engine", "recipes", "hostfiles", "pyproject.toml", "LICENSE", "README.md")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy, so that nothing is left in the checkout; without the network."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in PARTS:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=ignore)
        else:
            shutil.copy(path, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", out, source]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_it_carries_every_recipe_and_hostfile(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "engine").rglob("*.html")]
    files += [file for file in (ROOT / "hostfiles").iterdir() if file.is_file()]
    assert {str(file.relative_to(ROOT)) for file in files} <= names


def test_it_works_from_any_folder(wheel: Path, tmp_path: Path) -> None:
    """Unpacked beside nothing of the checkout, and found before it."""
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(installed)
    code = "import recipes, sys; from bytescale_cli.main import run; print(recipes.__file__); run(['config', 'show'])"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    origin, _, config = done.stdout.partition("\n")
    assert origin.startswith(str(installed))
    assert config == (ROOT / "tests" / "recipes" / "golden" / "quickstart.yaml").read_text(encoding="utf-8")
