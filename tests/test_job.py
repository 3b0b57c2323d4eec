"""A job: each of its parts is made once, and what a change of the config leaves alone is kept."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from bytescale_cli.main import run as bytescale
from engine.cluster import hostfile
from engine.cluster.hostfile import Node
from engine.config.load import load
from engine.fit.suggestions import with_values
from engine.job import Job
from tests.root import ROOT

SIZES = ["context=512", "capacity=256", "batch_tokens=2K"]


@pytest.fixture
def hosts(tmp_path: Path) -> str:
    (tmp_path / "hosts").write_text("localhost slots=2 speed=50%\n")
    return f"cluster.hostfile={tmp_path / 'hosts'}"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hostfiles that are read, each time."""
    found, read = list[str](), hostfile.read

    def noted(path: str) -> tuple[Node, ...]:
        found.append(path)
        return read(path)

    monkeypatch.setattr(hostfile, "read", noted)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--steps", "2"],
        ["simulate", "--planners", "adaptive", "--no-tuned", "--sweep", "context=256,512"],
        ["estimate-memory", "--fit", "--table"],
        ["tune", "parallel.tp=1", "parallel.pp=1", "zero.stage=1"],
        ["profile-data"],
        ["train", "--dry-run"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_reads_the_hostfile_once(
    words: list[str], hosts: str, reads: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *more = words
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.py").write_text("print()\n" * 2000)
    places = [f"data.path={tmp_path / 'data'}", f"data.cache={tmp_path / 'cache'}", f"run.out={tmp_path / 'run'}"]
    assert bytescale([command, "recipe=quickstart", hosts, *places, *SIZES, *more, "--json"]) == 0, capsys.readouterr()
    assert reads == [str(tmp_path / "hosts")]


def test_a_config_that_does_not_fit_is_suggested_others_without_another_read(hosts: str, reads: list[str]) -> None:
    assert bytescale(["plan", "recipe=quickstart", hosts, "cluster.device_memory=500M", "--json"]) == 10
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"capacity": 128}, True),
        ({"capacity": 128, "zero.stage": 3}, False),
        ({"context": 256}, False),
        ({"parallel.tp": 2}, False),
        ({"cluster.device_memory": 2**40, "cluster.speeds": (25,)}, False),
    ],
)
def test_a_job_with_other_values_is_the_job_of_its_config(
    changes: dict[str, Any], kept: bool, hosts: str, reads: list[str]
) -> None:
    job = Job(load(["recipe=quickstart", hosts, *SIZES]))
    changed = with_values(job.config, changes)
    found, afresh = job.with_config(changed), Job(changed)
    assert (found.cluster, found.mesh, found.costs, found.settings) == (
        afresh.cluster,
        afresh.mesh,
        afresh.costs,
        afresh.settings,
    )
    assert (found.costs is job.costs) == kept
    assert len(reads) == 2, "one of them afresh"


@pytest.mark.parametrize("changes", [{"cluster.nodes": 2}, {"cluster.ranks_per_node": 3}])
def test_another_number_of_nodes_or_ranks_makes_other_nodes(changes: dict[str, Any]) -> None:
    job = Job(load(["recipe=quickstart", "cluster.ranks_per_node=2"]))
    changed = with_values(job.config, changes)
    assert job.with_config(changed).cluster == Job(changed).cluster != job.cluster


def test_a_job_keeps_what_is_made_when_it_travels(hosts: str, reads: list[str]) -> None:
    """The process that plans gets that of its rank: it must not see another hostfile."""
    job = Job(load(["recipe=quickstart", hosts, *SIZES]))
    assert job.settings.ranks == 2
    there = pickle.loads(pickle.dumps(job))
    assert there.settings == job.settings and len(reads) == 1


def test_only_a_job_makes_the_cluster_and_the_settings_of_a_config() -> None:
    """Others get them from it, so a hostfile is not read again, and nobody plans with other costs."""
    files = [file for package in ("engine", "bytescale_cli") for file in (ROOT / package).rglob("*.py")]
    for call in ("Cluster.of(", "nodes_of(self", "PlanSettings.of("):
        assert [file.name for file in files if call in file.read_text(encoding="utf-8")] == ["job.py"], call
