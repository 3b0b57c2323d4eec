"""What a launch refuses, before anything is written, and how it begins, resumes or starts over."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from engine.config.load import resolved_yaml
from engine.errors import CheckpointError, ConfigError, DataError, MemoryFitError, RunFolderError
from engine.files import LOCK
from engine.launch import run as launch
from engine.launch import supervise
from engine.launch.agents.ranks import PreemptedError
from engine.launch.run import train
from engine.launch.schedulers import join
from engine.launch.schedulers.join import Joins
from engine.launch.schedulers.joined import Joined
from engine.launch.tail import MetricsTail
from engine.run import checkpoints
from engine.run.checkpoints import newest_first
from engine.run.folder import RunFolder
from engine.run.metrics import append
from engine.run.status import is_locked
from tests.launch.starts import config, files, finished, saved
from tests.permissions import locked_out
from tests.refusals import refused
from tests.ruins import ruin


@pytest.mark.parametrize(
    ("overrides", "launcher", "key"),
    [
        (["dtype=fp64"], None, "dtype=fp64"),
        (["model.window=4K"], None, "model.window"),
        (["model.vocab=100"], None, "model.vocab=100"),
        ([], "hostfile", "--launcher hostfile"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, overrides: list[str], launcher: str | None, key: str
) -> None:
    with refused(ConfigError, key):
        train(config(tmp_path, *overrides), launcher=launcher, dry_run=True)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_folder_of_another_program_is_refused_and_left_alone(tmp_path: Path, dry_run: bool) -> None:
    settings = config(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    before = files(tmp_path)
    with refused(RunFolderError, f"run.out={tmp_path / 'run'}", code=73) as problems:
        train(settings, dry_run=dry_run)
    assert "thesis.tex" in problems[0].message and files(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "dry_run"),
    [("", True), ("checkpoints", True), ("checkpoints", False), ("resolved.yaml", True), ("metrics.jsonl", False)],
)
def test_a_run_that_may_not_be_read_is_not_started_over(
    tmp_path: Path, name: str, dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "run_ranks", lambda *arguments: pytest.fail("it trains"))
    settings, folder = config(tmp_path), RunFolder(tmp_path / "run")
    saved(folder.checkpoints, settings)
    folder.resolved.write_text(resolved_yaml(settings))
    append(folder.metrics, {"step": 1})
    with locked_out(folder.root / name), pytest.raises((PermissionError, RunFolderError), match="Permission denied"):
        train(settings, dry_run=dry_run, say=lambda line: None)
    assert folder.metrics.read_text() == '{"step": 1}\n'


def test_a_refused_run_leaves_the_old_one_in_place(tmp_path: Path) -> None:
    saved(tmp_path / "run" / "checkpoints", config(tmp_path))
    (tmp_path / "run" / "resolved.yaml").write_text(resolved_yaml(config(tmp_path)))
    before = files(tmp_path)
    with pytest.raises(MemoryFitError):
        train(config(tmp_path, "cluster.device_memory=1MiB"), resume="never", say=lambda line: None)
    assert files(tmp_path) == before


def test_a_run_from_scratch_locks_its_new_folder_and_no_longer_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, root, seen = config(tmp_path), tmp_path / "run", list[tuple[bool, bool]]()
    saved(root / "checkpoints", settings)
    (root / "resolved.yaml").write_text(resolved_yaml(settings))

    def run_ranks(commands: object, folder: RunFolder, *rest: object) -> None:
        seen.append((is_locked(folder.root / LOCK), is_locked(tmp_path / "run.1" / LOCK)))

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, resume="never", say=lambda line: None)
    assert seen == [(True, False)] and not is_locked(root / LOCK)
    assert newest_first(tmp_path / "run.1" / "checkpoints") and not newest_first(root / "checkpoints")


def test_others_join_a_run_from_scratch_in_its_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that look into the old folder find nothing to join there."""
    monkeypatch.setattr(join, "_FAREWELL_S", 0.0)  # nobody comes
    settings, root, seen = config(tmp_path, "cluster.nodes=2"), tmp_path / "run", list[list[str]]()
    saved(root / "checkpoints", settings)
    (root / "resolved.yaml").write_text(resolved_yaml(settings))
    place = Joined("srun", "1.0", 0, 2, 0, 1, False, False)

    def run_ranks(commands: object, folder: RunFolder, *rest: object) -> None:
        seen.append([str(path.relative_to(tmp_path)) for path in tmp_path.glob("run*/logs/launch-*")])

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    with Joins(place, RunFolder(root), {"GLOO_SOCKET_IFNAME": "lo"}) as joins:
        train(settings, resume="never", say=lambda line: None, joins=joins)
    assert seen == [[f"run/logs/launch-{place.key}.json"]] and (tmp_path / "run.1").exists()


def test_a_finished_run_says_how_to_train_longer_and_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, said = list[Any](), list[str]()
    monkeypatch.setattr(supervise, "run_ranks", lambda commands, *rest: started.append(commands))
    done = saved(tmp_path / "run" / "checkpoints", config(tmp_path), 4)
    train(config(tmp_path, "run.steps=4"), say=said.append)
    assert not started
    (reported,) = [line for line in said if "nothing left to train" in line]
    assert reported.endswith("to train longer, set run.steps=8")
    train(config(tmp_path, "run.steps=8"), say=said.append)
    assert started[0][0].work.ranks[0][1][-1] == str(done)
    assert any("at step 5" in line for line in said)
    assert train(config(tmp_path, "run.steps=4"), dry_run=True)["dry_run"]["commands"] == []


def test_a_longer_run_says_what_the_learning_rate_does(tmp_path: Path) -> None:
    rates = ["optimizer.lr=1", "optimizer.warmup_steps=0", "optimizer.min_lr_ratio=0.1"]
    settings, said = config(tmp_path, "run.steps=4", *rates), list[str]()
    checkpoint = saved(tmp_path / "run" / "checkpoints", settings, 4)
    (tmp_path / "run" / "resolved.yaml").write_text(resolved_yaml(settings))
    for steps, resume in (("run.steps=8", "auto"), ("run.steps=8", str(checkpoint)), ("run.steps=4", "auto")):
        train(config(tmp_path, steps, *rates), resume=resume, dry_run=True, say=said.append)
    # Step 4 of 4 has the last rate, 0.1; in step 5 of 8 it is 0.1 + 0.9 * (1 + cos(5/8 pi)) / 2.
    line = "run.steps: 4 -> 8: the learning rate goes from 0.1 in step 4 to 0.378 in step 5, and is 0.1 in step 8"
    assert [one for one in said if "learning rate" in one] == [line] * 2
    train(config(tmp_path, "run.steps=5", *rates), dry_run=True, say=said.append)
    assert len([one for one in said if "learning rate" in one]) == 2, "it stays 0.1"
    (tmp_path / "run" / "resolved.yaml").write_text("steps: unknown")
    train(config(tmp_path, f"run.out={tmp_path / 'other'}"), str(checkpoint), dry_run=True, say=said.append)
    assert len([one for one in said if "learning rate" in one]) == 2, "a run of another version: nothing is known"


def test_other_hosts_are_not_local(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("alpha slots=2\n")
    hosts = config(tmp_path, f"cluster.hostfile={tmp_path / 'hosts'}")
    assert "ssh" in train(hosts, dry_run=True)["dry_run"]["commands"][0]
    with refused(ConfigError, "--launcher local"):
        train(hosts, launcher="local", dry_run=True)


@pytest.mark.parametrize("name", ["localhost", "me@localhost"])
def test_localhost_listed_with_other_hosts_is_refused(tmp_path: Path, name: str) -> None:
    """The other hosts would look for rank 0 on themselves."""
    (tmp_path / "hosts").write_text(f"{name} slots=1\nalpha slots=1\n")
    with refused(ConfigError, "cluster.hostfile") as problems:
        train(config(tmp_path, f"cluster.hostfile={tmp_path / 'hosts'}"), dry_run=True)
    assert problems[0].message.startswith(name)


def test_two_names_of_this_machine_stop_a_launch(tmp_path: Path) -> None:
    """Both would start ranks on the same GPUs, each as many as its slots."""
    (tmp_path / "hosts").write_text(f"localhost slots=1\n{socket.gethostname()} slots=1\n")
    settings = config(tmp_path, f"cluster.hostfile={tmp_path / 'hosts'}")
    (listed,) = train(settings, dry_run=True)["dry_run"]["refused"]
    with refused(ConfigError, "cluster.hostfile") as problems:
        train(settings)
    assert listed["key"] == "cluster.hostfile"
    assert problems[0].message.startswith(f"localhost and {socket.gethostname()} ")


def test_two_names_of_another_host_stop_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"alpha": ["10.0.0.7", "fd00::7"], "beta": ["10.0.0.8"], "gamma": ["fd00::7"]}

    def look(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", (address, 0)) for address in known[name]]

    monkeypatch.setattr(socket, "getaddrinfo", look)
    (tmp_path / "hosts").write_text("alpha slots=1\nbeta slots=1\nme@gamma slots=1\n")
    settings = config(tmp_path, f"cluster.hostfile={tmp_path / 'hosts'}")
    with refused(ConfigError, "cluster.hostfile") as problems:
        train(settings)
    assert problems[0].message.startswith("alpha and me@gamma ") and "fd00::7" in problems[0].message
    assert not (tmp_path / "run").exists()


def test_missing_data_and_missing_checkpoints_are_reported_before_any_rank_starts(tmp_path: Path) -> None:
    with refused(DataError, tmp_path / "gone"):
        train(config(tmp_path, f"data.path={tmp_path / 'gone'}"), say=lambda line: None)
    with refused(CheckpointError, f"--resume {tmp_path / 'nowhere'}"):
        train(config(tmp_path), resume=str(tmp_path / "nowhere"), say=lambda line: None)
    with refused(ConfigError, "--resume nver") as problems:
        train(config(tmp_path), resume="nver", say=lambda line: None)
    assert "never" in str(problems[0].hint)


def test_changed_documents_are_reported_on_resume(tmp_path: Path) -> None:
    settings = config(tmp_path)
    saved(tmp_path / "run" / "checkpoints", settings)
    train(settings, dry_run=True)
    (tmp_path / "data" / "3.py").write_text("changed")
    with refused(DataError):
        train(settings, dry_run=True)


def test_a_checkpoint_of_another_run_is_refused_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(supervise, "run_ranks", lambda *arguments: started.append(arguments))
    checkpoint = str(saved(tmp_path, config(tmp_path)))
    for change in ("run.seed=77", "data.validation_share=0.5"):
        with refused(CheckpointError, checkpoint) as problems:
            train(config(tmp_path, change), resume=checkpoint, say=lambda line: None)
        assert f"{change.partition('=')[0]}: " in problems[0].message
    assert not started
    assert not (tmp_path / "run" / "resolved.yaml").exists()


def test_another_number_of_ranks_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    checkpoint = str(saved(tmp_path, config(tmp_path)))
    for ranks in (2, 4):
        train(config(tmp_path, f"cluster.ranks_per_node={ranks}"), resume=checkpoint, dry_run=True, say=said.append)
    found = [line for line in said if "wrote the checkpoint" in line]
    assert found == ["2 ranks wrote the checkpoint; its states are divided among 4 now"]


def test_the_launcher_leaves_hashing_to_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one process; on a large checkpoint it would take minutes, before each start."""
    settings = config(tmp_path)
    checkpoint = saved(tmp_path, settings)
    monkeypatch.setattr(checkpoints, "_hash", lambda *arguments: pytest.fail("the launcher hashes"))
    monkeypatch.setattr(supervise, "run_ranks", lambda *arguments: None)
    train(settings, resume=str(checkpoint), say=lambda line: None)


def test_ruins_are_removed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may fill the disk. A dry run changes nothing."""
    settings, seen = config(tmp_path), list[list[str]]()
    checkpoints = saved(tmp_path / "run" / "checkpoints", settings).parent
    ruin(checkpoints / "step-00000004")
    ruin(checkpoints / "step-00000001", "removing")
    before = files(tmp_path)
    train(settings, dry_run=True)
    assert files(tmp_path) == before
    monkeypatch.setattr(supervise, "run_ranks", lambda *arguments: None)
    plan_start = launch.prepare.plan_start

    def spy(*arguments: Any, **more: Any) -> Any:
        seen.append([path.name for path in checkpoints.iterdir()])
        return plan_start(*arguments, **more)

    monkeypatch.setattr(launch.prepare, "plan_start", spy)  # it packs documents
    train(settings, say=lambda line: None)
    assert seen == [["step-00000001"]]


@pytest.mark.long
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_trackers_follow_the_steps_of_a_run(resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a new folder, after the old one was renamed. A dry run starts none."""
    pytest.importorskip("tensorboard")
    finished(tmp_path, monkeypatch, 2)
    settings = config(tmp_path, "run.steps=2", "run.trackers=[tensorboard]")
    train(settings, dry_run=True)
    assert not (tmp_path / "run").exists()

    def run_ranks(commands: object, folder: RunFolder, tail: MetricsTail, *_: object) -> None:
        for step in (1, 2):
            append(folder.metrics, {"step": step, "loss": 3.0})
            tail()

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    seen, said = list[int](), list[str]()
    for _ in range(2 if resume == "never" else 1):
        train(settings, resume=resume, say=said.append, on_step=lambda line: seen.append(line["step"]))
    folder = RunFolder(tmp_path / "run")
    assert json.loads(folder.tracker("tensorboard").read_text())["step"] == 2
    assert len(list((folder.trackers / "tensorboard").iterdir())) == 1
    assert seen == ([1, 2, 1, 2] if resume == "never" else [1, 2]) and not [line for line in said if "warning" in line]


def test_what_may_harm_or_end_a_run_is_said_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, said = finished(tmp_path, monkeypatch, 0), list[str]()
    notice = tmp_path / "notice"
    more = {"chaos": True, "notice_file": str(notice)}
    settings = settings.model_copy(update={"run": settings.run.model_copy(update=more)})
    monkeypatch.setattr(supervise, "run_ranks", lambda *rest: None)
    train(settings, say=said.append)
    assert "run.chaos=true: `bytescale chaos` may harm this run" in said
    assert RunFolder(Path(settings.run.out)).chaos.is_dir() and not any("notice" in line for line in said)
    notice.touch()

    def ends(*rest: object) -> None:
        raise PreemptedError("stopped on request")

    monkeypatch.setattr(supervise, "run_ranks", ends)
    with pytest.raises(PreemptedError):
        train(settings, say=said.append)
    assert f"warning: run.notice_file={notice} exists, so the run ends after a step; remove it to train longer" in said
    assert f"{notice} has appeared" in said


@pytest.mark.parametrize("fails", [False, True])
def test_a_folder_that_is_moved_under_a_run_is_the_error_whatever_the_ranks_say(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoints are in the moved folder, and a run that ends with success could not be resumed."""
    settings, moved = config(tmp_path), tmp_path / "moved"

    def run_ranks(commands: object, folder: RunFolder, tail: MetricsTail, *rest: object) -> None:
        saved(folder.checkpoints, settings)
        folder.root.rename(moved)
        if fails:
            tail()

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    with refused(RunFolderError, tmp_path / "run", code=73) as problems:
        train(settings, say=lambda line: None)
    assert f"{moved} " in problems[0].message and f"{moved}/checkpoints/step-" in str(problems[0].hint)
