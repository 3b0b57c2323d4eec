"""A built wheel carries recipes and hostfiles, and works from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.root import ROOT

pytestmark = pytest.mark.long

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


@pytest.fixture(scope="module")
def command(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in a new environment, which finds all other packages here; return its command."""
    home = tmp_path_factory.mktemp("environment") / "with a space"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin" / "python"
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    return home / "bin" / "bytescale"


@pytest.fixture
def shadowed(tmp_path: Path) -> Path:
    """A folder of a user's project, with modules that have the names of ours and of Python's."""
    folder = tmp_path / "my project"
    for name in (
        "engine.py",
        "bytescale_cli.py",
        "recipes/__init__.py",
        "hostfiles/__init__.py",
        "typing.py",
        "signal.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text("raise SystemExit('not ours')")
    for number in range(9):
        (folder / "texts" / f"{number}.txt").parent.mkdir(exist_ok=True)
        (folder / "texts" / f"{number}.txt").write_text("some words " * 40)
    return folder


SMALL = ["context=128", "capacity=128", "batch_tokens=512", "model.layers=1", "data.path=texts", "data.pattern=*.txt"]
FROM_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 looks in the working directory first")


@pytest.mark.world
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["recipes", "list"], "quickstart"),
        (["plan", "recipe=quickstart", *SMALL, "--steps=1"], "planner adaptive"),
        pytest.param(
            ["train", "recipe=quickstart", *SMALL, "run.steps=3", "cluster.ranks_per_node=1", "--out=run"],
            "run",
            marks=FROM_3_11,
        ),
    ],
)
def test_it_works_beside_modules_with_the_same_names(
    words: list[str], expected: str, command: Path, shadowed: Path, tmp_path: Path
) -> None:
    """Compiled code is switched off: compiling it for a new place takes minutes."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"NUMBA_DISABLE_JIT": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([command, *words], cwd=shadowed, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout
    if words[0] == "train":
        assert len((shadowed / "run" / "metrics.jsonl").read_text().splitlines()) == 3
        assert (shadowed / "run" / "report.html").is_file()
