"""`torchrun ... -m bytescale_cli train` trains as other launchers do, with one process for each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config.load import load
from engine.launch.run import train
from engine.run.checkpoints import newest_first, read
from tests.launch.small_run import SMALL, losses
from tests.trainer.worlds import in_worlds

pytestmark = pytest.mark.world

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def settings(out: Path, *more: str) -> list[str]:
    return [*SMALL, "run.steps=4", "data.validation_share=0", f"run.out={out}", "data.pattern='_*.py'", *more]


def start(processes: int, words: list[str]) -> subprocess.CompletedProcess[str]:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(processes), "-m", "bytescale_cli", "train", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_two_processes_train_two_ranks_with_the_losses_of_a_world_of_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = start(2, settings(tmp_path / "joined", "--json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["train"]["steps"] == 4, "one process prints"
    assert done.stderr.count("2 ranks, 4 steps") == 1
    in_worlds(monkeypatch, last=4)
    train(load(settings(tmp_path / "local", "cluster.ranks_per_node=2")), say=lambda line: None)
    assert losses(tmp_path / "joined") == losses(tmp_path / "local") and len(losses(tmp_path / "local")) == 4


@pytest.mark.slow  # test_joined.py reads these variables, and test_join.py joins nodes
def test_two_nodes_join(tmp_path: Path) -> None:
    """As RANK, WORLD_SIZE and MASTER_ADDR say, which operators of clusters set without torchrun."""
    place = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(29000 + os.getpid() % 1000),
    }
    command = [sys.executable, "-m", "bytescale_cli", "train", *settings(tmp_path / "run", "cluster.ranks_per_node=2")]
    started = [
        subprocess.Popen(command, env={**place, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in (1, 0)
    ]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert not said[0] and "4 ranks, 4 steps" in said[1], "only the first one talks"
    saved = newest_first(tmp_path / "run" / "checkpoints")[0]
    assert sorted(path.name for path in (saved / "zero").iterdir()) == [
        "ranks-00000-00001.states",
        "ranks-00002-00003.states",
    ]
    assert read(saved).step == 4, "all parts have their hashes"
