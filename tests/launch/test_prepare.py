"""The folder of a run: who owns it, who holds it, what is kept of an old run, and copies of checkpoints elsewhere."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine.config.load import load, resolved_yaml
from engine.data.ledger import Ledger
from engine.data.quarantine import Quarantine, Unusable
from engine.data.sequences import SequenceTable
from engine.errors import CheckpointError, ConfigError, DataError, PreflightError, RunFolderError
from engine.files import LOCK
from engine.job import Job
from engine.launch.launch import Launch
from engine.launch.prepare import (
    check_owner,
    fetched,
    go_back,
    locked,
    set_aside,
)
from engine.run.checkpoints import TrainState, read_state
from engine.run.compatibility import must_match
from engine.run.folder import RunFolder
from engine.run.metrics import append, read_metrics
from engine.run.remote import Remote
from tests.refusals import refused
from tests.ruins import ruin
from tests.run.damage import write_all


def test_a_folder_of_another_config_is_refused_with_the_difference(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    check_owner(folder, load(["recipe=quickstart"]))
    folder.resolved.write_text(resolved_yaml(load(["recipe=quickstart", "optimizer.lr=0.5"])))
    append(folder.metrics, {"step": 1})
    check_owner(folder, load(["recipe=quickstart", "optimizer.lr=0.5", "run.out=another/name/of/the/folder"]))
    for change, shown in (
        ("optimizer.lr=0.25", "optimizer.lr: 0.5 -> 0.25"),
        ("run.weights=folder", "run.weights: not set -> folder"),
    ):
        with refused(ConfigError, f"run.out={tmp_path}") as problems:
            check_owner(folder, load(["recipe=quickstart", change]))
        assert shown in problems[0].message


def test_a_run_that_never_finished_a_step_takes_another_config(tmp_path: Path) -> None:
    """Its launch failed, and the user corrected the config."""
    folder, other = RunFolder(tmp_path), load(["recipe=quickstart"])
    folder.resolved.write_text(resolved_yaml(load(["recipe=quickstart", "run.weights=folder"])))
    folder.metrics.touch()
    check_owner(folder, other)
    (folder.checkpoints / "step-00000001").mkdir(parents=True)  # damaged, but a user may be able to repair it
    with refused(ConfigError, f"run.out={tmp_path}") as problems:
        check_owner(folder, other)
    assert "run.weights: folder -> not set" in problems[0].message


def saved(folder: RunFolder, *overrides: str) -> Path:
    """A run of two ranks with a checkpoint of step 4; return the checkpoint."""
    config = load([f"run.out={folder.root}", *overrides])
    state = TrainState(4, {}, 2, {"data": "f"}, must_match(config))
    written = write_all(folder.checkpoints, state)
    append(folder.metrics, {"step": 4})
    folder.resolved.write_text(resolved_yaml(config))
    return written


def test_a_run_goes_on_in_its_folder_with_other_ranks_plans_and_lengths(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    saved(folder)
    elastic = ["cluster.ranks_per_node=5", "zero.stage=3", "capacity=512", "planner=naive", "optimizer.on_host=true"]
    harmless = ["run.steps=7", "run.checkpoint_every=1", "run.validate_every=2", "data.path=elsewhere"]
    for change in ([one] for one in (*elastic, *harmless)):
        check_owner(folder, load([f"run.out={folder.root}", *change]))
    check_owner(folder, load([f"run.out={folder.root}", *elastic, *harmless]))
    shutil.rmtree(folder.checkpoints)
    places = ["data.cache=elsewhere", "data.spool=1GiB", "data.loaders=1", "data.quarantine_after=9"]
    check_owner(folder, load([f"run.out={folder.root}", *elastic, *places]))
    with refused(ConfigError, f"run.out={folder.root}") as problems:
        check_owner(folder, load([f"run.out={folder.root}", *harmless]))
    assert "data.path: stdlib-lines -> elsewhere" in problems[0].message


def test_a_change_of_what_a_run_learns_is_refused_with_a_way_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    checkpoint = saved(folder)
    for change, elsewhere in (
        (["optimizer.lr=0.5"], True),
        (["batch_tokens=64K", "zero.stage=3", "cluster.ranks_per_node=3"], True),
        (["run.seed=7"], False),  # the checkpoint would be refused
    ):
        with refused(ConfigError, f"run.out={folder.root}") as problems:
            check_owner(folder, load([f"run.out={folder.root}", *change]))
        named = problems[0].message.partition(": ")[2]
        assert named.startswith(f"{change[0].partition('=')[0]}: ") and ";" not in named, "nothing else"
        assert (f"--resume {checkpoint}" in str(problems[0].hint)) == elsewhere
    shutil.rmtree(checkpoint)
    with refused(ConfigError, f"run.out={folder.root}") as problems:
        check_owner(folder, load([f"run.out={folder.root}", "optimizer.lr=0.5"]))
    assert "--resume" not in str(problems[0].hint)


def test_a_run_with_a_damaged_config_can_be_resumed_elsewhere(tmp_path: Path) -> None:
    """Its config lacks a key, but the checkpoint says what must match."""
    folder = RunFolder(tmp_path / "run")
    checkpoint = saved(folder)
    folder.resolved.write_text(folder.resolved.read_text().replace("  restarts: 3\n", ""))
    with refused(ConfigError, folder.resolved) as problems:
        check_owner(folder, load([f"run.out={folder.root}"]))
    assert "run.restarts" in problems[0].message and f"--resume {checkpoint}" in str(problems[0].hint)
    check_owner(RunFolder(tmp_path / "other"), load([f"run.out={tmp_path / 'other'}"]))


def test_two_names_of_one_folder_of_data_are_one_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path)
    folder.resolved.write_text(resolved_yaml(load(["data=folder", "data.path=texts"])))
    append(folder.metrics, {"step": 1})
    for same in ("texts", "./texts/", str(tmp_path / "texts")):
        check_owner(folder, load(["data=folder", f"data.path={same}"]))
    with refused(ConfigError) as problems:
        check_owner(folder, load(["data=folder", "data.path=other/texts"]))
    assert "data.path: texts -> other/texts" in problems[0].message
    folder.resolved.write_text(resolved_yaml(load([])))
    with refused(ConfigError) as problems:
        check_owner(folder, load(["data.path=./stdlib"]))
    assert "data.path: stdlib-lines -> ./stdlib" in problems[0].message


def test_folders_created_for_a_lock_are_removed_if_they_stay_empty(tmp_path: Path) -> None:
    kept = RunFolder(tmp_path / "kept")
    kept.root.mkdir()
    for folder in (kept, RunFolder(tmp_path / "new" / "run")):
        with locked(folder):
            assert folder.logs.is_dir() and folder.checkpoints.is_dir()
    assert list(tmp_path.rglob("*")) == [kept.root]
    with locked(kept):
        kept.log(0).touch()
    assert kept.log(0).exists()


def test_the_end_of_a_run_whose_folder_was_renamed_keeps_the_lock_of_the_next_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    with ExitStack() as next_run:
        with locked(folder):
            set_aside(folder)
            next_run.enter_context(locked(folder))
        assert (folder.root / LOCK).exists()


def test_a_lock_file_that_its_holder_just_removed_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next process would create another file, and two would hold the folder."""
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: (tmp_path / ".lock").unlink())
    with refused(RunFolderError, tmp_path), locked(RunFolder(tmp_path)):
        pass


@pytest.mark.long
def test_a_run_in_use_is_locked_and_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    hold = (
        "import sys\nfrom pathlib import Path\nfrom engine.launch.prepare import locked\n"
        "from engine.run.folder import RunFolder\n"
        f"with locked(RunFolder(Path({str(tmp_path)!r}))):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    with refused(RunFolderError, tmp_path, code=73), locked(RunFolder(tmp_path)):
        pass
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    with locked(RunFolder(tmp_path)):
        pass


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = RunFolder(tmp_path / "file" / "run")
    with refused(RunFolderError, folder.root), locked(folder):
        pass


def test_an_old_run_is_renamed_and_kept(tmp_path: Path) -> None:
    for expected in ("run.1", "run.2"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "resolved.yaml").write_text("x")
        assert set_aside(RunFolder(tmp_path / "run")) == tmp_path / expected
    assert (tmp_path / "run.1" / "resolved.yaml").read_text() == "x"


def test_going_back_removes_later_steps(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    ruin(folder.checkpoints / "step-00000004")
    for name in ("step-00000002", "step-00000003"):
        (folder.checkpoints / name).mkdir(parents=True)
        (folder.checkpoints / name / "a.pt").write_bytes(b"a")
    for step in (1, 2, 3):
        append(folder.metrics, {"step": step})
    go_back(folder, 2, lambda line: None)
    left = sorted(path.name for path in folder.checkpoints.iterdir())
    assert len(left) == 2
    assert left[0].startswith("abandoned-step-00000003-")
    assert left[1] == "step-00000002"
    assert read_metrics(folder.metrics) == [{"step": 1}, {"step": 2}]


def test_a_run_whose_checkpoints_are_gone_says_that_it_starts_again(tmp_path: Path) -> None:
    """Somebody may have removed the folder to save space, and not know that the run needs it."""
    folder, said = RunFolder(tmp_path), list[str]()
    for number in (1, 2):
        for step in (1, 2, 3):
            append(folder.metrics, {"step": step})
        go_back(folder, 0, said.append)
        kept = tmp_path / f"metrics.jsonl.{number}"
        again = f"the run starts again at step 1, and the metrics of 3 steps are now in {kept}"
        assert said == [f"warning: {folder.checkpoints} has no checkpoint: {again}"]
        assert read_metrics(folder.metrics) == [] and len(read_metrics(kept)) == 3
        go_back(folder, 0, said.append)
        assert len(said) == 1
        said.clear()


def test_a_run_that_begins_again_without_a_checkpoint_may_have_repaired_documents(tmp_path: Path) -> None:
    """Its steps are lost, so nothing depends on what the documents were. With a checkpoint, they must be the same."""
    folder, zeros = RunFolder(tmp_path), np.zeros(1, dtype=np.int64)
    plan: Any = SimpleNamespace(ring_ranks=zeros, shard_slice=zeros, slice_sequence=zeros, before=zeros)

    def record(step: int, content: int) -> None:
        table = SequenceTable(zeros, zeros, zeros, zeros, zeros + 1, zeros + 1, np.array([content], dtype=np.uint64))
        Ledger(folder.ledger, ["data"]).record(step, table, plan)

    for step in (1, 2):
        record(step, content=7)
    ruin(tmp_path / "ledger", "removing")  # left by a start that was killed
    unusable = Unusable("data", 0, 3, "a.jsonl:byte 9", "is not JSON")
    assert Quarantine(folder.quarantine).add(1, [unusable]) == 1
    go_back(folder, 1, lambda line: None)
    with pytest.raises(DataError):
        record(2, content=8)
    assert Quarantine(folder.quarantine).add(2, []) == 1
    go_back(folder, 0, lambda line: None)
    assert not list(tmp_path.glob(".removing*")) and not folder.quarantine.exists()
    for step in (1, 2):
        record(step, content=8)
    assert Ledger(folder.ledger).documents(1)["hash"].tolist() == [8]
    go_back(RunFolder(tmp_path), 0, lambda line: None)
    go_back(RunFolder(tmp_path), 0, lambda line: None)  # a run that has neither yet


# Checkpoints in a remote folder


class Copied(NamedTuple):
    """A run of step 4 with copies of steps 2 and 4 in a remote folder, by another name of the same config."""

    folder: RunFolder
    remote: Remote
    said: list[str]

    def fetched(self, resume: str = "auto", *overrides: str, dry_run: bool = False) -> str:
        launch = Launch(Job(load([f"run.out={self.folder.root}", *overrides])), self.said.append)
        return fetched(launch, self.remote, resume, dry_run)


@pytest.fixture
def copied(tmp_path: Path) -> Copied:
    remote, before = Remote(f"file://{tmp_path}/remote"), RunFolder(tmp_path / "before")
    state = read_state(saved(before))
    for step in (4, 2):
        remote.upload(write_all(before.checkpoints / str(step), replace(state, step=step), "a.pt"))
    return Copied(RunFolder(tmp_path / "run"), remote, [])


def test_a_run_without_its_folder_goes_on_from_the_newest_copy(copied: Copied) -> None:
    """Else it would start over silently, and its new checkpoints would replace the copies."""
    found = copied.fetched()
    assert found == str(copied.folder.checkpoints / "step-00000004") and read_state(Path(found)).step == 4
    assert copied.fetched() == "auto", "it has it now"
    copied.remote.abandon(2)
    assert copied.fetched() == "auto", "the copy is older"


def test_a_copy_that_is_newer_than_the_run_folder_is_used(copied: Copied) -> None:
    """The run went on elsewhere. It would go back, and make the later copies unusable."""
    write_all(copied.folder.checkpoints, replace(read_state(saved(copied.folder)), step=3), "a.pt")
    shutil.rmtree(copied.folder.checkpoints / "step-00000004")
    assert copied.fetched() == str(copied.folder.checkpoints / "step-00000004")


def test_a_url_is_copied_and_then_a_path(copied: Copied) -> None:
    found = copied.fetched(f"{copied.remote.url}/step-00000002")
    assert found == str(copied.folder.checkpoints / "step-00000002")
    other = RunFolder(copied.folder.root.with_name("other"))
    launch = Launch(Job(load([f"run.out={other.root}"])), copied.said.append)
    found = fetched(launch, None, copied.remote.url, False)
    assert found == str(other.checkpoints / "step-00000004")
    for resume in ("auto", "never", "a/path"):
        assert fetched(launch, None, resume, False) == resume


def test_a_copy_of_another_config_is_refused_before_it_is_copied(copied: Copied) -> None:
    with refused(CheckpointError, copied.remote.url) as problems:
        copied.fetched("auto", "dtype=bf16")
    assert "dtype: fp32 -> bf16" in problems[0].message
    assert not copied.folder.checkpoints.exists()
    saved(copied.folder)
    with refused(ConfigError, f"run.out={copied.folder.root}"):
        copied.fetched(copied.remote.url, "optimizer.lr=0.5")


def test_a_new_run_does_not_mix_its_copies_with_those_of_another(copied: Copied) -> None:
    for resume in ("never", "a/path", f"{copied.remote.url}/elsewhere"):
        with refused(ConfigError, "run.remote") as problems:
            copied.fetched(resume)
        assert "step-00000004" in problems[0].message
    saved(copied.folder)
    assert copied.fetched("a/path") == "a/path", "the run goes back"
    with refused(ConfigError, "run.remote"):
        copied.fetched("never")


def test_a_dry_run_copies_nothing(copied: Copied) -> None:
    assert copied.fetched(dry_run=True) == "auto"
    assert copied.said == [f"this dry run copies nothing; a run would resume from {copied.remote.url}/step-00000004"]
    assert not copied.folder.root.exists()


def test_a_remote_folder_that_does_not_answer_stops_only_a_run_without_checkpoints(
    copied: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> list[str]:
        raise TimeoutError("no answer")

    monkeypatch.setattr(copied.remote, "newest_first", fails)
    with refused(PreflightError) as problems:
        copied.fetched()
    assert "TimeoutError: no answer" in problems[0].message
    saved(copied.folder)
    assert copied.fetched() == "auto"
    assert copied.said[0].startswith(f"warning: {copied.remote.url} cannot be read: TimeoutError: no answer")
