from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from engine.config.load import load, resolved_yaml
from engine.config.schema import Config
from engine.data.overview import Corpora
from engine.data.quarantine import MOST
from engine.data.steps import Cursor
from engine.errors import (
    BytescaleError,
    CheckpointError,
    ConfigError,
    DataError,
    ExitCode,
    MemoryFitError,
    RunFolderError,
)
from engine.files import LOCK
from engine.fit import host as host_memory
from engine.launch import run as launch
from engine.launch import supervise
from engine.launch.agents.commands import NodeCommand
from engine.launch.agents.ranks import PreemptedError, RankError
from engine.launch.run import train
from engine.launch.schedulers import join
from engine.launch.schedulers.join import Joins
from engine.launch.schedulers.joined import Joined
from engine.launch.tail import MetricsTail, left_out_so_far
from engine.run import checkpoints
from engine.run.checkpoints import TrainState, newest_first
from engine.run.compatibility import must_match
from engine.run.folder import RunFolder
from engine.run.launches import read_launches
from engine.run.metrics import append
from engine.run.status import is_locked
from engine.weights import check
from tests.permissions import locked_out
from tests.refusals import refused
from tests.ruins import ruin
from tests.run.damage import write_all


def config(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "data").mkdir(exist_ok=True)
    for number in range(12):
        (tmp_path / "data" / f"{number}.py").write_text(f"print({number})\n" * 40)
    small = ["recipe=quickstart", f"data.path={tmp_path / 'data'}", f"run.out={tmp_path / 'run'}"]
    return load([*small, "context=256", "capacity=128", "batch_tokens=1K", *overrides])


def test_a_dry_run_plans_three_steps_and_writes_nothing(tmp_path: Path) -> None:
    shown = train(config(tmp_path), dry_run=True)["dry_run"]
    assert [step["step"] for step in shown["steps"]] == [1, 2, 3]
    assert all(step["max_degree"] == 2 for step in shown["steps"])
    assert len(shown["commands"]) == shown["nodes"] == 1 and shown["ranks"] == 2
    assert "engine.launch.agents.agent" in shown["commands"][0]
    assert shown["program"].endswith(f" -m engine.trainer {tmp_path / 'run'}")
    assert shown["refused"] == []
    assert not (tmp_path / "run").exists()


def test_a_step_that_is_larger_than_the_corpus_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = train(config(tmp_path, "batch_tokens=1M", "capacity=8K"), dry_run=True)["dry_run"]["warnings"]
    assert (found["code"], found["key"]) == ("small_corpus", "batch_tokens")
    assert f"warning: batch_tokens: {found['message']}" in capsys.readouterr().out


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


def test_a_dry_run_lists_what_a_run_refuses(tmp_path: Path) -> None:
    asked = config(tmp_path, "cluster.nodes=2", "parallel.tp=2")
    shown = train(asked, dry_run=True)["dry_run"]
    assert [problem["key"] for problem in shown["refused"]] == ["cluster.nodes=2"]
    assert shown["refused"][0]["message"] == "several nodes need a hostfile"
    assert len(shown["commands"]) == shown["nodes"] == 2
    with pytest.raises(ConfigError) as caught:
        train(asked)
    assert [problem.key for problem in caught.value.problems] == [problem["key"] for problem in shown["refused"]]
    assert not (tmp_path / "run").exists()


def test_a_dry_run_lists_a_full_host_as_a_run_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(tmp_path, "optimizer.on_host=true")
    assert train(asked, dry_run=True)["dry_run"]["refused"] == []
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 0)
    (listed,) = train(asked, dry_run=True)["dry_run"]["refused"]
    with refused(MemoryFitError) as problems:
        train(asked)
    assert listed == asdict(problems[0])
    (tmp_path / "hosts").write_text("alpha slots=2\n")
    elsewhere = config(tmp_path, "optimizer.on_host=true", f"cluster.hostfile={tmp_path / 'hosts'}")
    assert train(elsewhere, dry_run=True)["dry_run"]["refused"] == [], "its memory is not known here"


def test_a_dry_run_of_millions_of_devices_builds_only_the_first_commands(tmp_path: Path) -> None:
    wide = ["model.hidden=131072", *(f"model.{key}=65536" for key in ("heads", "kv_heads", "ffn"))]
    devices = ["cluster.nodes=16384", "cluster.ranks_per_node=64", "parallel.tp=65536", *wide]
    shown = train(config(tmp_path, *devices), dry_run=True)["dry_run"]
    assert (shown["ranks"], len(shown["commands"])) == (2**20, 2**14)


def test_a_dry_run_names_its_lengths_and_those_of_the_plan_command(tmp_path: Path) -> None:
    """Otherwise somebody compares steps of the two commands."""
    shown = train(config(tmp_path, "lengths=github", "planner=static"), dry_run=True)["dry_run"]
    assert (shown["planner"], shown["mode"], shown["plan_source"]) == ("static", "free", "lengths=github")
    assert (shown["source"], shown["outlook"]) == (f"data.path={tmp_path / 'data'}", "starting at step 1")
    known = Corpora(config(tmp_path)).overview
    assert known is not None and shown["documents"] == known.training


def test_the_outlook_names_the_weights_that_a_run_starts_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "check_weights", lambda folder, config: [])
    asked = config(tmp_path, "run.weights=hf")
    assert train(asked, dry_run=True)["dry_run"]["outlook"] == "starting at step 1 with the weights of hf"
    saved(tmp_path / "run" / "checkpoints", asked)
    assert "resuming from" in train(asked, dry_run=True)["dry_run"]["outlook"], "then they are not read"


def test_devices_are_distinguished_from_hdp_ranks(tmp_path: Path) -> None:
    wide = config(tmp_path, "cluster.ranks_per_node=8", "parallel.tp=2")
    shown = train(wide, dry_run=True)["dry_run"]
    assert [shown[name] for name in ("ranks", "hdp_ranks", "tp", "pp")] == [8, 4, 2, 1]


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_folder_of_another_program_is_refused_and_left_alone(tmp_path: Path, dry_run: bool) -> None:
    settings = config(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").touch()
    before = files(tmp_path)
    with refused(RunFolderError, f"run.out={tmp_path / 'run'}", code=73) as problems:
        train(settings, dry_run=dry_run)
    assert "thesis.tex" in problems[0].message and files(tmp_path) == before


def test_a_warm_up_that_never_ends_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for steps, expected in (
        (19, ["optimizer.warmup_steps=20 is more than run.steps=19: optimizer.lr is never reached"]),
        (20, []),
    ):
        said: list[str] = []
        finished(tmp_path, monkeypatch, steps)
        train(config(tmp_path, f"run.steps={steps}"), resume="never", say=said.append)
        assert [line for line in said if "warmup" in line] == expected


def files(tmp_path: Path) -> list[str]:
    """All paths below a folder."""
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))


def test_a_dry_run_resumes_from_a_checkpoint_and_changes_nothing(tmp_path: Path) -> None:
    settings = config(tmp_path)
    old, damaged = (saved(tmp_path / "run" / "checkpoints", settings, step) for step in (1, 2))
    (damaged / "a").write_text("flipped")
    before, said = files(tmp_path), list[str]()
    shown = train(settings, dry_run=True, say=said.append)["dry_run"]
    assert files(tmp_path) == before
    assert [step["step"] for step in shown["steps"]] == [2, 3, 4]
    assert (shown["steps_done"], shown["checkpoint"]) == (1, str(old))
    assert shown["outlook"] == f"resuming from {old} at step 2"
    assert shown["program"].endswith(str(old)) and said[0].endswith("using step-00000001 instead")
    (tmp_path / "run" / "resolved.yaml").write_text(resolved_yaml(settings))
    before = files(tmp_path)
    fresh = train(settings, dry_run=True, resume="never", say=said.append)["dry_run"]
    assert f"a run would rename the folder of the old run to {tmp_path / 'run.1'}" in said
    assert (fresh["steps"][0]["step"], fresh["checkpoint"]) == (1, None) and files(tmp_path) == before


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_dry_run_refuses_what_a_run_refuses_and_neither_leaves_files(tmp_path: Path, dry_run: bool) -> None:
    config(tmp_path)
    other = str(saved(tmp_path / "saved", config(tmp_path, "run.seed=7")))
    (tmp_path / "file").touch()
    out, before = f"run.out={tmp_path / 'new' / 'run'}", files(tmp_path)
    refusals: list[tuple[list[str], str, int]] = [
        ([out, "data.path=/nowhere"], "auto", 4),
        ([out], str(tmp_path / "nowhere"), 5),
        ([out], other, 5),
        ([out, "cluster.device_memory=1MiB"], "auto", 10),
        ([f"run.out={tmp_path / 'file' / 'run'}"], "auto", 73),
    ]
    for overrides, resume, code in refusals:
        with pytest.raises(BytescaleError) as caught:
            train(config(tmp_path, *overrides), resume=resume, dry_run=dry_run, say=lambda line: None)
        assert (caught.value.code, files(tmp_path)) == (code, before)


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
    assert "run.steps: 4 -> 5: the learning rate goes from 0.1 in step 4 to 0.1 in step 5" in said, "nothing twice"
    (tmp_path / "run" / "resolved.yaml").write_text("steps: unknown")
    train(config(tmp_path, f"run.out={tmp_path / 'other'}"), str(checkpoint), dry_run=True, say=said.append)
    assert len([one for one in said if "learning rate" in one]) == 3, "a run of another version: nothing is known"


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


def saved(tmp_path: Path, of: Config, step: int = 1) -> Path:
    """Write a checkpoint of two ranks, with one file."""
    state = TrainState(step, Cursor(step).to_json(), 2, Corpora(of).fingerprints, must_match(of))
    return write_all(tmp_path, state, "a")


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


def damage_found(folder: RunFolder, *arguments: object) -> None:
    """Stand in for ranks that find damage in their parts of the checkpoint."""
    raise RankError("checkpoint is damaged", ExitCode.NO_CHECKPOINT, folder.log(1), "see its log", 1, "localhost")


def test_damage_that_ranks_find_leads_to_the_newest_intact_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, started, said = config(tmp_path), list[Path](), list[str]()
    old, damaged = (saved(tmp_path / "run" / "checkpoints", settings, step) for step in (1, 2))
    (damaged / "a").write_bytes(bytes((damaged / "a").stat().st_size))

    def run_ranks(commands: object, folder: RunFolder, *rest: object) -> None:
        started.append(newest_first(folder.checkpoints)[0])
        if len(started) == 1:
            damage_found(folder)

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, say=said.append)
    assert started == [damaged, old], "the damaged one has been renamed"
    (line,) = [line for line in said if "damaged" in line]
    assert line == "warning: step-00000002 is damaged (a does not match its hash); using step-00000001 instead"
    assert len(list(damaged.parent.glob("abandoned-step-00000002-*"))) == 1


@pytest.mark.parametrize("resume", ["never", "path"])
def test_damage_in_a_checkpoint_of_its_own_does_not_take_a_run_back_to_where_it_began(
    resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, began = config(tmp_path), list[str]()
    asked = str(saved(tmp_path / "other", settings)) if resume == "path" else resume

    def run_ranks(commands: list[NodeCommand], folder: RunFolder, *rest: object) -> None:
        began.append(Path(commands[0].work.ranks[0][1][-1]).name)
        if len(began) == 1:
            for step in (2, 3):
                append(folder.metrics, {"step": step, "loss": 3.0})
                newest = saved(folder.checkpoints, settings, step)
            (newest / "a").write_bytes(bytes((newest / "a").stat().st_size))
            raise RankError("rank 1 was killed", 137, folder.log(1), "run it again", 1, "localhost")
        if len(began) == 2:
            damage_found(folder)

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, resume=asked, say=lambda line: None)
    first = "run" if resume == "never" else "step-00000001"
    assert began == [first, "step-00000003", "step-00000002"]


def test_damage_that_only_the_ranks_see_ends_the_run_after_a_second_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, started, said = config(tmp_path), list[object](), list[str]()
    folder = RunFolder(tmp_path / "run")
    saved(folder.checkpoints, settings)

    def run_ranks(commands: object, folder: RunFolder, *rest: object) -> None:
        started.append(commands)
        damage_found(folder)

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    with refused(RankError, folder.log(1), code=5, rank=1):
        train(settings, say=said.append)
    assert len(started) == 2
    assert any(line.endswith("the launcher finds no damage and tries once more") for line in said)


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


def test_a_resumed_run_shows_each_new_step_once_even_if_old_lines_were_lost(tmp_path: Path) -> None:
    path, shown = tmp_path / "metrics.jsonl", []
    append(path, {"step": 7})  # steps 1 to 6 are lost
    tail = MetricsTail(RunFolder(tmp_path), config(tmp_path), shown.append, print)
    tail()
    assert shown == []
    for step in (8, 9):
        append(path, {"step": step})
        tail()
    tail()
    assert shown == [{"step": 8}, {"step": 9}]


def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int, error: Exception | None = None) -> Config:
    """Let the ranks write metrics and end, with an error or without; let the report fail. Return a config."""
    settings = config(tmp_path, "run.steps=2")

    def run_ranks(commands: object, folder: RunFolder, *rest: object) -> None:
        for step in range(1, lines + 1):
            append(folder.metrics, {"step": step, "loss": 3.0})
        if error is not None:
            raise error

    def broken(folder: Path) -> Path:
        raise ValueError("no\nfonts")

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    monkeypatch.setattr("engine.report.run_page.write_report", broken)
    return settings


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(28, "No space left on device", "r.html"), "r.html: No space left on device"),
    ],
)
def test_a_report_that_the_disk_has_no_space_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, why: str
) -> None:
    def full(folder: Path) -> Path:
        raise error

    settings, said = finished(tmp_path, monkeypatch, 2), list[str]()
    monkeypatch.setattr("engine.report.run_page.write_report", full)
    train(settings, say=said.append)
    assert f"the report could not be written: {why}" in said


def test_a_failing_report_is_reported_and_changes_no_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    result = train(finished(tmp_path, monkeypatch, 2), say=said.append)["train"]
    assert (result["steps"], result["loss"], result["report"]) == (2, 3.0, None)
    assert "the report could not be written: ValueError: no fonts" in said
    with pytest.raises(PreemptedError):
        train(finished(tmp_path, monkeypatch, 1, PreemptedError("stopped")), resume="never", say=said.append)
    assert said[-1] == "the report could not be written: ValueError: no fonts"


def test_each_start_is_recorded_with_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = finished(tmp_path, monkeypatch, 1, PreemptedError("stopped on request"))
    with pytest.raises(PreemptedError):
        train(settings, say=lambda line: None)
    finished(tmp_path, monkeypatch, 2)
    train(settings, say=lambda line: None)
    first, second = read_launches(RunFolder(tmp_path / "run").launches)
    assert (first.step, first.ranks, first.hosts, first.outcome) == (1, 2, ["localhost"], "stopped on request")
    assert second.outcome == "" and first.ended is not None and second.ended is not None
    assert first.began <= first.ended <= second.began <= second.ended


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


def test_lost_metrics_of_a_finished_run_are_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = finished(tmp_path, monkeypatch, 0)
    result = train(settings, resume=str(saved(tmp_path, settings)), say=lambda line: None)["train"]
    assert (result["steps"], result["loss"], result["validation_loss"]) == (1, None, None)


def test_a_lost_last_line_is_reported_and_no_older_loss_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of an older step is not the result of the run."""
    settings, said = finished(tmp_path, monkeypatch, 0), list[str]()
    saved(tmp_path / "run" / "checkpoints", settings, 2)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    result = train(settings, say=said.append)["train"]
    assert (result["steps"], result["loss"]) == (2, None)
    assert [line for line in said if "metrics.jsonl:2: this line is damaged" in line]


def test_a_damaged_file_of_a_finished_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, said = config(tmp_path, "run.steps=1"), list[str]()
    saved(tmp_path / "run" / "checkpoints", settings)
    append(tmp_path / "run" / "metrics.jsonl", {"step": 1, "loss": 3.0})
    for name in ("plan.bin", "trace.json"):
        (tmp_path / "run" / name).write_bytes(b"\0" * 40)
    assert train(settings, say=said.append)["train"]["steps"] == 1
    assert [line for line in said if f"report could not be written: {tmp_path}/run/plan.bin: is damaged: " in line]


def test_a_run_that_ends_for_want_of_documents_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said, settings = list[str](), config(tmp_path, "run.steps=90", "data.exhausted=stop")
    steps, cursor = Corpora(settings).steps, Cursor()
    while (found := steps.next(cursor)) is not None:
        cursor = found[1]
    last, root = cursor.step, tmp_path / "run"

    def run_ranks(commands: object, folder: RunFolder, *rest: object) -> None:
        append(folder.metrics, {"step": last, "loss": 3.0, "ended": "all were used"})

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, say=said.append)
    ended = f"{root}: the run ended after step {last} of run.steps=90: all were used"
    assert [line for line in said if "ended after" in line] == [ended]

    state = TrainState(last, cursor.to_json(), 2, Corpora(settings).fingerprints, must_match(settings))
    write_all(root / "checkpoints", state)
    said.clear()
    monkeypatch.setattr(supervise, "run_ranks", lambda *rest: pytest.fail("there is nothing to train"))
    train(settings, say=said.append)
    why = "all documents were used; set data.exhausted=repeat to use them again"
    left = f"{root}: nothing left to train after step {last}: {why}"
    assert [line for line in said if "nothing left" in line or "ended after" in line] == [left]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.exhausted=stop"], "stop the run"),
        (["data.sources.web.exhausted=repeat", "data.sources.code.exhausted=repeat"], "repeat them"),
        (["data.exhausted=drop", "data.sources.web.exhausted=repeat"], "repeat them (web), drop the source (code)"),
    ],
)
def test_a_run_says_what_happens_when_a_source_has_been_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], expected: str
) -> None:
    """Sources for validation alone are not trained on, so their policy does not matter."""
    finished(tmp_path, monkeypatch, 2)
    said = list[str]()
    if any("sources" in one for one in overrides):
        places = [f"data.sources.{name}.path={tmp_path / 'data'}" for name in ("web", "code", "held")]
        overrides = [*overrides, *places, "data.sources.held.exhausted=drop", "data.mix={web: 3, code: 1, held: 0}"]
    train(config(tmp_path, "run.steps=2", *overrides), say=said.append)
    line = f"when all documents of a source were used (data.exhausted): {expected}"
    assert [one for one in said if one.startswith("when all documents")] == [line]


def test_documents_that_were_left_out_are_reported_when_their_number_has_doubled_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, said = finished(tmp_path, monkeypatch, 0), list[str]()

    def run_ranks(commands: object, folder: RunFolder, tick: Callable[[], None], *rest: object) -> None:
        for step, left_out in enumerate((0, 0, 1, 1, 2, 3, 5), start=1):
            append(folder.metrics, {"step": step, "loss": 3.0, **({"left_out": left_out} if left_out else {})})
            tick()

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, say=said.append)
    file = tmp_path / "run" / "quarantine.jsonl"
    assert [line for line in said if "left out" in line] == [
        f"warning: 1 document could not be used and was left out; see {file}",
        f"warning: 2 documents could not be used and were left out; see {file}",
        f"warning: 5 documents could not be used and were left out; see {file}",
        f"5 documents could not be used and were left out; see {file}",
    ]
    assert left_out_so_far(MOST, RunFolder(tmp_path)).startswith("at least 10,000 documents could not be used")


def test_skipped_steps_are_said_whenever_their_number_has_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, said = finished(tmp_path, monkeypatch, 0), list[str]()

    def run_ranks(commands: object, folder: RunFolder, tick: Callable[[], None], *rest: object) -> None:
        for step, skipped in enumerate((0, 1, 2, 0, 1, 0, 1, 2), start=1):
            append(folder.metrics, {"step": step, "loss": 3.0, **({"skipped": skipped} if skipped else {})})
            tick()

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, say=said.append)
    found = [line.partition(", because loss or gradients are not finite; the last is ") for line in said]
    assert [(what, where.partition(":")[0]) for what, because, where in found if because] == [
        ("warning: 1 step was skipped", "step 2"),
        ("warning: 2 steps were skipped", "step 3"),
        ("warning: 4 steps were skipped", "step 7"),
    ]


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


def test_a_host_with_too_little_memory_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, said, shown = finished(tmp_path, monkeypatch, 0), list[str](), list[Any]()

    def run_ranks(commands: object, folder: RunFolder, tick: Callable[[], None], *rest: object) -> None:
        for step, short in enumerate([None, 3 * 2**30, 3 * 2**30], start=1):
            append(folder.metrics, {"step": step, "loss": 3.0, "host_short": short, "copy_short": short})
            tick()

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, say=said.append, on_step=shown.append)
    (reported,) = [line for line in said if "for offload" in line]
    assert reported.startswith("warning: a host lacked 3.0 GiB that a rank needs for offload")
    (waiting,) = [line for line in said if "copy of a rank's states" in line]
    assert waiting.startswith("warning: a host lacked 3.0 GiB") and "training waits while checkpoints are" in waiting
    assert len(shown) == 3


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["data.long=step"],
            "a longer document forms a step of its own; data.long=split distributes its pieces over steps",
        ),
        (
            ["data.long=split", "context=2K"],
            "a longer piece of context=2048 tokens forms a step of its own; set a smaller context",
        ),
    ],
)
def test_a_step_beyond_batch_tokens_is_said_once(tmp_path: Path, overrides: list[str], expected: str) -> None:
    """Of more than 64 MiB, the lengths of documents are not known before."""
    folder, said, shown = RunFolder(tmp_path), list[str](), list[Any]()
    folder.metrics.touch()
    tail = MetricsTail(folder, config(tmp_path, *overrides), shown.append, said.append)
    for step, tokens in enumerate((1000, 1024, 1025, 9000), start=1):
        append(folder.metrics, {"step": step, "tokens": tokens})
        tail()
    assert said == [f"warning: step 3 has 1,025 tokens, more than batch_tokens=1024: {expected}"]
    assert len(shown) == 4


@pytest.mark.parametrize(("balances", "low"), [([0.3] * 12, 1), ([0.3] * 9, 0), ([0.3] * 5 + [0.8] * 5 + [0.1] * 9, 0)])
def test_a_low_balance_of_the_first_ten_steps_is_said_once(tmp_path: Path, balances: list[float], low: int) -> None:
    folder, said = RunFolder(tmp_path), list[str]()
    folder.metrics.touch()
    tail = MetricsTail(folder, config(tmp_path), lambda line: None, said.append)
    for step, balance in enumerate(balances, start=1):
        append(folder.metrics, {"step": step, "balance": balance})
        tail()
    assert len(said) == low and all(line.startswith("warning: batch_tokens: ") and "30%" in line for line in said)


@pytest.mark.parametrize(("names", "sets"), [([], "set is"), (["web", "code"], "sets of web, code are")])
def test_validation_sets_that_are_empty_are_said_once(tmp_path: Path, names: list[str], sets: str) -> None:
    folder, said = RunFolder(tmp_path), list[str]()
    folder.metrics.touch()
    places = [f"data.sources.{name}.path={tmp_path}" for name in names]
    mix = [f"data.mix={{{', '.join(f'{name}: 1' for name in names)}}}"] if names else []
    tail = MetricsTail(folder, config(tmp_path, *places, *mix), lambda line: None, said.append)
    for step in (1, 2):
        append(folder.metrics, {"step": step, "unvalidated": names or ["data"]})
        tail()
    hint = "set a larger data.validation_share or data.validation_tokens"
    assert said == [f"warning: the validation {sets} empty; {hint}"]


def test_output_that_fails_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(line: str) -> None:
        raise BrokenPipeError

    assert train(finished(tmp_path, monkeypatch, 2), say=broken)["train"]["steps"] == 2


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


def test_damaged_metrics_are_reported_once_while_ranks_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, said = config(tmp_path), list[str]()

    def run_ranks(commands: object, folder: RunFolder, tail: MetricsTail, *rest: object) -> None:
        for content in (b"\0\0\n", b"", b'{"step": 2, "loss": 1.0}\n'):
            with folder.metrics.open("ab") as file:
                file.write(content)
            tail()

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    train(settings, say=said.append)
    assert len([line for line in said if str(tmp_path / "run" / "metrics.jsonl") in line and "damaged" in line]) == 1
