"""`bytescale chaos`: what is planted, what is harmed at once, and which runs are left alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from bytescale_cli.main import run as bytescale
from engine.config.load import load, resolved_yaml
from engine.control.chaos import Fault
from engine.errors import CheckpointError
from engine.files import LOCK, locked
from engine.launch import chaos
from engine.launch.chaos import harm
from engine.run.checkpoints import check_hashes, newest_first
from engine.run.folder import RunFolder
from tests.run.damage import save


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of two ranks that allows chaos, with two checkpoints."""
    config = load(["recipe=quickstart", "run.chaos=true", "cluster.ranks_per_node=2"])
    (tmp_path / "run").mkdir()
    RunFolder(tmp_path / "run").resolved.write_text(resolved_yaml(config))
    for step in (3, 6):
        save(tmp_path / "run" / "checkpoints", step)
    return tmp_path / "run"


def planted(run: Path, rank: int) -> list[Fault]:
    return [Fault(**json.loads(path.read_text())) for path in sorted((run / "chaos" / f"rank-{rank}").iterdir())]


def test_a_fault_is_planted_for_a_rank(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chaos", str(run), "stop-rank", "--rank", "1", "--at", "backward", "--step", "4", "--times", "2"]
    assert bytescale([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["chaos"]
    assert (answer["fault"], answer["rank"], answer["at"], answer["step"]) == ("stop-rank", 1, "backward", 4)
    assert bytescale(["chaos", str(run), "slow-rank", "--rank", "1", "--factor", "3"]) == 0
    assert planted(run, 1) == [Fault("stop-rank", "backward", 4, 2, 2.0), Fault("slow-rank", None, 0, 1, 3.0)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kill-rank", "--rank", "2"], "--rank 2: is not among the 2 ranks of the run\nhint: for example --rank 1\n"),
        (["kill-rank", "--at", "sleep"], "--at sleep: is not a phase of a step"),
        (["kill-rank", "--at", "rename", "--rank", "1"], "--at rename: is done by rank 0 alone"),
        (["kill-rank", "--at", "transfer"], "--at transfer: is between the stages of a pipeline"),
        (["kill-rank", "--times", "0"], "--times: must be at least 1, not 0"),
        (["kill-rank", "--step", "-1"], "--step: must be at least 0, not -1"),
        (["kill-rank", "--factor", "3"], "--factor: is not a flag of kill-rank"),
        (["slow-rank", "--times", "2"], "--times: is not a flag of slow-rank"),
        (["corrupt-checkpoint", "--rank", "1"], "--rank: is not a flag of corrupt-checkpoint"),
        (["fill-disk", "--at", "save"], "--at: is not a flag of fill-disk"),
        (["slow-rank", "--factor", "0.5"], "--factor: must be from 1 to 1000, not 0.5"),
        (["kill-rnk"], "Did you mean kill-rank?"),
    ],
)
def test_mistakes_are_answered(run: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bytescale(["chaos", str(run), *words]) == 2
    error = capsys.readouterr().err
    assert said.lower() in error.lower() and error.count("\n") <= 3
    assert not list((run / "chaos").glob("rank-*"))


def test_a_run_that_is_not_running_gets_a_fault_only_if_it_can_go_on(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["chaos", str(run), "kill-rank"]
    assert bytescale(words) == 0
    assert "it happens after the next start" in " ".join(capsys.readouterr().out.split())
    with locked(run / LOCK):
        assert bytescale(words) == 0
        assert "next start" not in " ".join(capsys.readouterr().out.split())
    before = planted(run, 0)
    RunFolder(run).metrics.write_text(json.dumps({"step": 9, "ended": "no documents are left"}) + "\n")
    assert bytescale(words) == 2
    assert f"{run}: has finished" in capsys.readouterr().err
    assert planted(run, 0) == before


@pytest.mark.parametrize("fault", ["kill-rank", "corrupt-checkpoint", "fill-disk"])
def test_a_run_that_does_not_allow_it_is_left_alone(run: Path, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder(run).resolved.write_text(resolved_yaml(load(["recipe=quickstart"])))
    assert bytescale(["chaos", str(run), fault]) == 2
    assert "only a run that was started with run.chaos=true may be harmed" in capsys.readouterr().err
    assert not (run / "chaos").exists()
    check_hashes(newest_first(run / "checkpoints")[0])


def test_the_newest_checkpoint_is_corrupted(run: Path) -> None:
    newest, older = newest_first(run / "checkpoints")
    said = harm(run, Fault("corrupt-checkpoint"), 0)
    with pytest.raises(CheckpointError, match="does not match its hash"):
        check_hashes(newest)
    assert str(newest) in said
    check_hashes(older)


def test_a_run_without_a_checkpoint_has_none_to_corrupt(run: Path) -> None:
    (run / "checkpoints").rename(run / "gone")
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        harm(run, Fault("corrupt-checkpoint"), 0)


def test_a_large_disk_is_not_filled(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chaos, "_LARGEST_DISK", 1 << 20)
    assert bytescale(["chaos", str(run), "fill-disk"]) == 73
    assert "which other programs may need" in capsys.readouterr().err
    assert not (run / "chaos" / "ballast").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_small_disk_is_filled(run: Path) -> None:
    disk = run.with_name("disk")
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        (disk / "resolved.yaml").write_bytes((run / "resolved.yaml").read_bytes())
        said = harm(disk, Fault("fill-disk"), 0)
        assert os.statvfs(disk).f_bavail == 0 and "ballast" in said
        with pytest.raises(OSError, match="No space left"):
            (disk / "more").write_bytes(bytes(1 << 13))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
