"""A world of a test without the mark is a failure, and costly tests of `make check` are listed, with the sum of all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiers
from tests.root import ROOT
from tests.world import run_world

BUSY = """
import time

def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_cheap():
    spin(0.6)

def test_costly():
    spin(1.1)
"""


def test_a_world_needs_its_mark(request: pytest.FixtureRequest) -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        run_world(1, print)
    assert request.node.nodeid in str(caught.value) and "pytest.mark.world" in str(caught.value)


@pytest.mark.world
def test_a_marked_test_may_begin_one() -> None:
    tiers.begins_world()


@pytest.mark.long
def test_costly_tests_are_listed_where_long_ones_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "test_busy.py").write_text(BUSY)
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "tests.conftest"]
    command = [sys.executable, "-m", "pytest", *options, "--numprocesses", "1", "-m", "not long", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (costly, named), (total, _) = re.findall(r"([\d.]+) s of processor time: (.*)", said)
    assert named == "test_busy.py::test_costly" and float(costly) >= 1.1
    assert float(total) >= float(costly) + 0.6 - 0.1, "each is rounded"
