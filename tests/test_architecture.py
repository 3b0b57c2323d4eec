"""The rules of docs/design.md about which package may import which."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.layers import LAYERS, ROOMS
from tests.root import ROOT

PURE = (
    "family",
    "config",
    "cluster",
    "run",
    "control",
    "cost",
    "planner",
    "job",
    "fit",
    "simulator",
    "data",
    "report",
    "trackers",
    "tune",
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    """Return every module of the repository by its dotted name."""
    files = [file for package in ("engine", "bytescale_cli") for file in (ROOT / package).rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports(file: Path) -> Iterator[str]:
    """Yield the names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package(name: str) -> str:
    """Return the package of a module: engine.config.load -> config."""
    parts = name.split(".")
    return parts[1] if parts[0] == "engine" and len(parts) > 1 else parts[0]


def room(name: str) -> str:
    """Return the subpackage of a module: engine.launch.agents.ranks -> agents; empty if it is in none."""
    parts = name.removeprefix("engine.").split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS[parts[0]] else ""


def ours(name: str, known: dict[str, Path]) -> str | None:
    """Return the module of ours that an imported name is or lives in."""
    parent = name.rpartition(".")[0]
    return name if name in known else parent if parent in known else None


MODULES = modules()
IMPORTS = {name: list(imports(file)) for name, file in MODULES.items()}


def test_there_is_something_to_hold() -> None:
    assert {"engine.config.load", "bytescale_cli.main"} <= set(MODULES)
    assert {package(name) for name in MODULES} - {"engine"} <= set(LEVEL)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_arrows_run_down(name: str) -> None:
    for imported in IMPORTS[name]:
        target = ours(imported, MODULES)
        if target is not None and package(target) != "engine":
            assert LEVEL[package(name)] <= LEVEL[package(target)], f"{name} imports {target}"


@pytest.mark.parametrize("name", sorted(name for name in MODULES if package(name) in ROOMS))
def test_arrows_between_rooms_run_down(name: str) -> None:
    """What is directly in the package may import every room, and no room imports it."""
    rooms = ("", *ROOMS[package(name)])
    level = rooms.index(room(name))
    for imported in IMPORTS[name]:
        target = ours(imported, MODULES)
        if target is not None and package(target) == package(name):
            assert level <= rooms.index(room(target)), f"{name} imports {target}"


def test_there_is_no_import_cycle() -> None:
    graph = {
        name: {target for imported in IMPORTS[name] if (target := ours(imported, MODULES)) and target != name}
        for name in MODULES
    }
    TopologicalSorter(graph).prepare()  # raises CycleError and names the cycle


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("deepspeed", "engine.zero"),
        ("ray", "engine.remote"),
        ("hydra", "engine.config"),
        ("typer", "bytescale_cli"),
        ("tokenizers", "engine.data.tokenizers"),
        ("sentencepiece", "engine.data.tokenizers"),
        ("tiktoken", "engine.data.tokenizers"),
        ("tensorboard", "engine.trackers"),
        ("wandb", "engine.trackers"),
        ("mlflow", "engine.trackers"),
    ],
)
def test_a_library_has_one_home(library: str, home: str) -> None:
    users = {name for name, found in IMPORTS.items() if any(i.split(".")[0] == library for i in found)}
    assert {name for name in users if not f"{name}.".startswith(f"{home}.")} == set()


def test_pure_packages_import_no_torch() -> None:
    """Not even through others: every module of them is imported in a fresh process."""
    pure = [name for name in MODULES if package(name) in PURE]
    code = f"import importlib, sys; [importlib.import_module(n) for n in {pure!r}]; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & {"torch", "deepspeed", "ray", "tokenizers", "sentencepiece", "tiktoken"} == set()


def test_the_command_line_is_imported_without_what_is_heavy() -> None:
    code = "import sys, bytescale_cli.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & {"torch", "deepspeed", "ray", "pydantic", "hydra", "numpy"} == set()


def test_package_init_files_stay_nearly_empty() -> None:
    """An `__init__` that imports everything makes every import of one thing an import of all."""
    inits = [file for package_ in ("engine", "bytescale_cli") for file in (ROOT / package_).rglob("__init__.py")]
    assert [file for file in inits if len(file.read_text(encoding="utf-8").splitlines()) > 5] == []


def test_no_test_imports_another() -> None:
    """What several tests share is in helper modules, so that a test can be moved or deleted alone."""
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    used = {(file.name, name) for file in files for name in imports(file) if re.match(r"tests\..*\btest_", name)}
    assert used == set()


def test_json_and_yaml_of_files_are_parsed_in_one_place() -> None:
    """Others' files may be too deep, too large, or no files at all: `engine/readers.py` refuses them."""
    parsers = {"json": ("load", "loads"), "yaml": ("load", "safe_load", "compose", "parse")}
    found = {
        name
        for name, file in modules().items()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.attr in parsers.get(node.value.id, ())
    }
    assert found == {"engine.readers", "engine.config.yaml_reader"}
