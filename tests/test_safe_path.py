"""Files in the user's folder with the names of our modules or of Python's are not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cluster.cluster import Node
from engine.config.load import load
from engine.data.scan import scan
from engine.errors import BytescaleError
from engine.job import Job
from engine.launch.agents.commands import node_commands
from engine.launch.agents.ranks import run_ranks
from engine.run.folder import RunFolder
from engine.safe_path import safe_path
from tests.root import ROOT

pytestmark = pytest.mark.long

WRONG = "raise SystemExit('not ours')"
FROM_3_11 = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always looks there first")


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working directory with modules that must not be imported; ours are found by PYTHONPATH."""
    (tmp_path / "engine").mkdir()
    for name in ("engine/__init__.py", "typing.py", "signal.py"):
        (tmp_path / name).write_text(WRONG)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # so that monkeypatch restores it in the end
    monkeypatch.delenv("PYTHONSAFEPATH")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@FROM_3_11
def test_a_rank_imports_no_module_of_the_working_directory(working: Path) -> None:
    folder = RunFolder(working / "run")
    folder.logs.mkdir(parents=True)
    commands = node_commands(Job(load([]), (Node("localhost", 1),)), folder, None)
    with pytest.raises(BytescaleError):
        run_ranks(commands, folder, lambda: None, lambda line: None)
    said = folder.log(0).read_text() + folder.node_log(0).read_text()
    assert "not ours" not in said
    assert str(ROOT / "engine" / "trainer" / "rank.py") in said, "it fails there because there is no resolved config"


def test_nor_does_the_command_as_a_module(working: Path) -> None:
    """`python -m` puts the working directory first."""
    (working / "recipes").mkdir()
    (working / "recipes" / "__init__.py").write_text(WRONG)
    words = [sys.executable, "-m", "bytescale_cli", "recipes", "list"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout


@FROM_3_11
def test_nor_does_a_process_that_reads_documents(working: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.data.scan.cores", lambda: 2)
    (working / "data").mkdir()
    for number in range(150):
        (working / "data" / f"{number:03d}.txt").write_text("x")
    data = load(["data.path=data", "data.format=folder", "data.pattern='*.txt'"]).data
    before = dict(os.environ)
    assert len(scan(data, None, seed=0).lengths) == 150
    assert dict(os.environ) == before, "what this process starts later is not concerned"


def test_ranks_on_other_hosts_get_the_variable(working: Path) -> None:
    nodes = (Node("alpha", 1), Node("beta", 1))
    commands = node_commands(Job(load([]), nodes), RunFolder(working), None)
    assert all(" PYTHONSAFEPATH=1 " in command.arguments[-1] for command in commands), "agents"
    assert all(command.work.environment["PYTHONSAFEPATH"] == "1" for command in commands), "ranks"


def test_in_our_own_checkout_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert safe_path() == {}
