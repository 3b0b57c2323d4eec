from __future__ import annotations

import fcntl
import json
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
from engine.config.schema import Config
from engine.data.ledger import Ledger
from engine.data.overview import Corpora, tokenizer_facts
from engine.data.pack import pack
from engine.data.quarantine import Quarantine, Unusable
from engine.data.steps import Cursor, SequenceTable
from engine.errors import CheckpointError, ConfigError, DataError, PreflightError, RunFolderError
from engine.files import LOCK
from engine.job import Job
from engine.launch.launch import Launch
from engine.launch.prepare import (
    Start,
    _changed_documents,
    check_owner,
    fetched,
    go_back,
    locked,
    plan_start,
    set_aside,
    write_facts,
)
from engine.launch.say import Say
from engine.run.checkpoints import TrainState, newest_first, read_state
from engine.run.compatibility import must_match
from engine.run.folder import RunFolder
from engine.run.metrics import append, read_metrics
from engine.run.remote import Remote
from tests.data.past_run import run_of
from tests.data.token_files import megatron, written
from tests.data.tokenizers.chat_folder import CHATML, chat_folder
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


# Where a run goes on


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Overrides of a run on two sources of texts."""
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
        for number in range(8):
            (tmp_path / name / f"{number}.txt").write_text(f"text {number} of {name} " * 9)
    named = [f"data.sources.{name}.path={tmp_path / name}" for name in ("web", "code")]
    places = [f"run.out={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}"]
    return ["recipe=quickstart", "data=folder", "data.pattern=*.txt", *named, *places, "batch_tokens=512"]


HALF = "data.mix={web: 1, code: 1}"


def stopped(config: Config, steps: int = 1, cursor: dict[str, Any] | None = None) -> Cursor:
    """Write a checkpoint after some steps, with another cursor if there is one; return where the next step begins."""
    corpora, at = Corpora(config), Cursor()
    for _ in range(steps):
        found = corpora.steps.next(at)
        assert found is not None
        at = found[1]
    kept = at.to_json() if cursor is None else cursor
    state = TrainState(steps, kept, 2, corpora.fingerprints, must_match(config), tokenizer=tokenizer_facts(config.data))
    checkpoints = RunFolder(Path(config.run.out)).checkpoints
    shutil.rmtree(checkpoints, ignore_errors=True)  # one that is published is never replaced
    write_all(checkpoints, state)
    return at


def start(config: Config, say: Say = lambda line: None) -> Start:
    return plan_start(Launch(Job(config), say), "auto", 1, hashes=False)


def test_ids_of_other_tools_are_compared_with_the_vocabulary_before_a_run(tmp_path: Path) -> None:
    """Of a dry run, too; the key is the file, and the hint has its largest token."""
    prefix = megatron(tmp_path / "a", [[[1, 2, 300]], [[4, 511]]] * 40)
    own = ["data=tokens", f"data.path={prefix}", f"run.out={tmp_path / 'run'}", "data.validation_tokens=0"]
    with refused(DataError, f"{prefix}.bin") as problems:
        start(load([*own, "model.vocab=511"]))
    assert "model.vocab to 512" in str(problems[0].hint)
    assert start(load([*own, "model.vocab=512"])).plans


def test_a_resume_says_that_documents_of_the_last_step_have_other_contents(
    tmp_path: Path, sources: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of equal names and sizes have the same fingerprint. Only blocks that the run opens anyway are looked at."""
    config, said = load([*sources, HALF]), list[str]()
    stopped(config)
    folder, corpora, zeros = RunFolder(tmp_path / "run"), Corpora(config), np.zeros(1, dtype=np.int64)
    found = corpora.steps.next(Cursor())
    assert found is not None
    plan: Any = SimpleNamespace(ring_ranks=zeros, shard_slice=zeros, slice_sequence=zeros, before=zeros)
    Ledger(folder.ledger, [corpus.name for corpus in corpora.sources]).record(1, found[0], plan)
    start(config, said.append)
    assert not any("changed" in line for line in said)
    for path in tmp_path.glob("web/*.txt"):
        path.write_text(path.read_text().upper())
    web = int((found[0].source == [one.name for one in corpora.sources].index("web")).sum())
    for few in (True, False):  # all blocks are opened, or those of the first window
        monkeypatch.setattr(Corpora, "are_few", few)
        said.clear()
        start(config, said.append)
        (line,) = (line for line in said if "changed" in line)
        assert line.startswith(
            f"warning: {web} of {len(found[0])} documents of step 1 have changed since, for example web:"
        )
    assert 0 < web < len(found[0])


def test_the_facts_of_a_run_say_which_tokenizers_made_its_tokens(tmp_path: Path) -> None:
    """`ckpt export` reads them: the token files may be gone by then."""
    (tmp_path / "a.txt").write_text("a text")
    tokenizer = chat_folder(tmp_path / "ours", None)
    common = [f"run.out={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}", "model.vocab=400"]
    texts = ["data=folder", f"data.path={tmp_path}", "data.pattern=*.txt"]
    pack(load([*texts, f"data.tokenizer={tokenizer}"]).data, tmp_path / "packed")
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    theirs = written(tmp_path / "theirs", [[1, 2]])
    for words, expected in (
        (texts, "bytes"),
        (["data=tokens", f"data.path={tmp_path / 'packed'}"], "huggingface"),
        (["data=tokens", f"data.path={theirs}"], "unknown"),
    ):
        config = load([*common, *words])
        corpora = Corpora(config)
        corpora.pack_first(Cursor(), print)
        write_facts(folder, config, corpora, 1)
        assert json.loads(folder.summary.read_text())["tokenizers"] == [expected]


def test_a_tokenizer_that_was_moved_is_the_same_and_another_is_refused(tmp_path: Path, sources: list[str]) -> None:
    folder, vocabulary = chat_folder(tmp_path / "tokenizer", None), "model.vocab=400"
    before = load([*sources, HALF, vocabulary, f"data.tokenizer={folder}"])
    stopped(before)
    moved = folder.rename(tmp_path / "moved")
    for place in (moved, moved / "tokenizer.json"):
        assert start(load([*sources, HALF, vocabulary, f"data.tokenizer={place}"])).step == 1
    other = chat_folder(tmp_path / "other", None, size=390)
    only_new = [f"data.sources={{new: {{path: {tmp_path / 'web'}}}}}", "data.mix={new: 1}"]
    for documents in ([*sources, HALF], [*sources[:3], *only_new, *sources[-3:]]):
        with refused(CheckpointError, "...step-00000001") as problems:
            start(load([*documents, vocabulary, f"data.tokenizer={other}"]))
        message = problems[0].message
        assert f"{folder} (BOS " in message and f" -> {other} (BOS " in message and "; " not in message
    with refused(CheckpointError, "...step-00000001") as problems:
        start(load([*sources, HALF, vocabulary, f"data.tokenizer={moved}", "data.eos=false"]))
    assert "data.tokenizer: " in problems[0].message and "EOS none" in problems[0].message


def test_a_checkpoint_of_an_older_order_of_documents_is_refused(sources: list[str]) -> None:
    config = load([*sources, HALF])
    stopped(config)
    assert start(config).step == 1
    stopped(config, cursor={})
    with refused(CheckpointError, "...step-00000001") as problems:
        start(config)
    assert "bytescale ckpt export" in str(problems[0].hint)


def test_a_source_that_was_trained_on_does_not_become_one_for_validation(sources: list[str]) -> None:
    """All its documents would be: also those that the model has learned."""
    stopped(load([*sources, HALF]))
    with refused(ConfigError, "data.mix") as problems:
        start(load([*sources, "data.mix={web: 1, code: 0}"]))
    assert "data.sources.code" in str(problems[0].hint)
    assert start(load([*sources, "data.mix=[{weights: {web: 1, code: 1}}, {step: 1, weights: {web: 1}}]"])).step == 1
    left_out = [one for one in sources if not one.startswith("data.sources.code")]
    assert start(load([*left_out, "data.mix={web: 1}"])).step == 1


def test_a_resume_says_which_sources_are_new_back_or_left_out(tmp_path: Path, sources: list[str]) -> None:
    """Sources are known by their names, so a typo in one would let its documents begin again."""
    stopped(load([*sources, HALF]))
    said, out = list[str](), RunFolder(tmp_path / "run")
    for name in ("new", "held"):
        shutil.copytree(tmp_path / "web", tmp_path / name)
        (tmp_path / name / "0.txt").write_text(f"another text of {name}")

    def resume(*names: str) -> None:
        places = ", ".join(f"{name}: {{path: {tmp_path / name}}}" for name in names)
        weights = ", ".join(f"{name}: {int(name != 'held')}" for name in names)
        only = [one for one in sources if not one.startswith("data.sources")]
        config = load([*only, f"data.sources={{{places}}}", f"data.mix={{{weights}}}"])
        start(config, lambda line: said.append(line) if line.startswith("data.sources") else None)  # no progress
        state = read_state(newest_first(out.checkpoints)[0])
        corpora = Corpora(config)
        found = corpora.steps.next(Cursor.of_json(state.cursor))
        assert found is not None
        known = {**state.fingerprints, **corpora.fingerprints}  # as the trainer saves them
        after = replace(state, step=state.step + 1, cursor=found[1].to_json(), fingerprints=known)
        write_all(out.checkpoints, after)

    resume("web", "code")
    assert said == []
    resume("web", "new", "held")
    resume("web", "new", "held")
    resume("code", "web", "new")
    begins = "new is new and begins at its first document; held is new and for validation alone; code is left out"
    back = "code is back and continues where it stopped; held is left out"
    assert said == [f"data.sources: {begins}", f"data.sources: {back}"]
    (tmp_path / "web").rename(tmp_path / "wbe")
    with refused(DataError) as problems:
        resume("code", "wbe")
    assert "wbe" in problems[0].message and "web" in problems[0].message


def test_a_source_for_validation_stays_one(sources: list[str]) -> None:
    config = load([*sources, "data.mix={web: 1, code: 0}"])
    cursor = stopped(config)
    assert cursor.mixer is not None and cursor.mixer["sources"]["code"][0] == 0
    assert start(config).step == 1


def test_facts_name_the_tokens_that_end_a_text(tmp_path: Path) -> None:
    """Those of the weights, also when these are gone, and the end of a turn of the chat template."""
    weights = chat_folder(tmp_path / "weights", CHATML)
    (weights / "generation_config.json").write_text('{"eos_token_id": [1, 3], "top_p": 0.9}')
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    places = [f"data.path={tmp_path / 'a.jsonl'}", f"data.cache={tmp_path / 'cache'}", f"run.weights={weights}"]
    config = load(["data=jsonl", *places, f"data.tokenizer={weights}", "model.vocab=400"])
    folder = RunFolder(tmp_path)
    corpora = Corpora(config)
    for _ in range(2):
        write_facts(folder, config, corpora, 0)
        facts = json.loads(folder.summary.read_text())
        assert (facts["end_of_turn"], facts["generation"]) == (3, {"eos_token_id": [1, 3], "top_p": 0.9})
        shutil.rmtree(weights, ignore_errors=True)


def test_a_start_warns_of_a_damaged_ledger_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text of a document")
    data = ["data=folder", f"data.path={tmp_path}", "data.pattern='*.txt'", "data.validation_share=0"]
    folder, config = run_of(tmp_path, *data, "context=16", "capacity=16", "batch_tokens=16", steps=2)
    corpora, cursor = Corpora(config), Cursor()
    for _ in range(2):
        found = corpora.steps.next(cursor)
        assert found is not None
        _, cursor = found
    assert _changed_documents(folder, corpora, cursor) is None
    path = folder.ledger / "ranks-00000000.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    said = str(_changed_documents(folder, corpora, cursor))
    assert said.startswith("warning: the ledger is damaged: ranks-00000000.bin: step 2 ")
