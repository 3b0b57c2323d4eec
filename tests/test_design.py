"""docs/design.md agrees with the repository: its map has every package, and the files that it names exist."""

from __future__ import annotations

import re

import pytest

from engine.config.choices import values_of
from engine.config.schema import Data
from engine.data.runtime.runtimes import RUNTIMES
from tests.layers import LAYERS
from tests.root import ROOT

DESIGN = (ROOT / "docs" / "design.md").read_text()
MAP = DESIGN.split("## Map of packages")[1].split("\n## ")[0]
ROOMS = {
    "planner": MAP.split("The planner has five subpackages:")[1].split("`engine/planner")[0],
    "launch": MAP.split("`engine/launch` has three subpackages,")[1].split("`engine/launch")[0],
}
ROWS = [set(re.findall(r"`(\w+)`", line.split("|")[1])) for line in MAP.splitlines() if line.startswith("| `")]
PATHS = sorted(set(re.findall(r"`((?:engine|recipes|tests|docs|bytescale_cli)/[^`]*)`", DESIGN)))


def test_the_map_is_the_order_of_layers_that_the_architecture_test_enforces() -> None:
    assert [set(row) for row in LAYERS] == ROWS


def test_the_map_has_every_package() -> None:
    engine = {path.name for path in (ROOT / "engine").iterdir() if (path / "__init__.py").exists()}
    assert set.union(*ROWS) >= engine | {"bytescale_cli"}


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_are_named(package: str) -> None:
    rooms = {path.name for path in (ROOT / "engine" / package).iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(re.findall(r"`(\w+)`", ROOMS[package]))


@pytest.mark.parametrize("path", PATHS)
def test_a_named_place_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("engine/planner/planners.py", "PLANNERS"),
        ("engine/cost/optimizers.py", "OPTIMIZERS"),
        ("tests/zero/engines.py", "KINDS"),
        ("tests/zero/test_memory.py", "CASES"),
        ("engine/run/compatibility.py", "_SAME_RUN"),
        ("engine/run/compatibility.py", "def must_match"),
        ("engine/config/versions.py", "CHANGES"),
        ("engine/hardware/fit.py", "def _compute"),
        ("engine/models/common/product.py", "PRODUCT"),
        ("engine/report/run_page.py", "def run_page"),
        ("engine/trainer/optimizer.py", "def build_optimizer"),
        ("engine/data/sources/source.py", "class Block"),
        ("engine/data/sources/formats.py", "FORMATS"),
        ("engine/data/runtime/runtimes.py", "RUNTIMES"),
        ("engine/data/runtime/runtime.py", "class DataRuntime"),
        ("engine/data/blocks/blocks.py", "class Blocks"),
        ("tests/data/blocks/test_blocks.py", "MAKE"),
        ("engine/models/build.py", "def build_model"),
    ],
)
def test_the_entry_points_for_additions_are_where_the_table_says(file: str, name: str) -> None:
    assert name in (ROOT / file).read_text()


def test_the_schema_names_what_the_tables_have() -> None:
    """So a runtime is one entry of its table."""
    assert set(values_of(Data.model_fields["runtime"])) == set(RUNTIMES)
