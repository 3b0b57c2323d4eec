from __future__ import annotations

import errno
import math
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from engine.cluster.mesh import Mesh
from engine.config.load import load
from engine.control import progress
from engine.control.control import Control
from engine.control.protocol import At, Planned
from engine.data.blocks.blocks import BlockId
from engine.data.quarantine import Dropped
from engine.data.runtime.runtimes import RUNTIMES
from engine.data.steps import Cursor
from engine.errors import ExitCode, MemoryFitError, RunFolderError, StorageError
from engine.planner.plan.step_plan import StepPlan
from engine.run.background import BackgroundWriter
from engine.run.checkpoints import Range, Share, newest_first, read
from engine.run.folder import Held, RunFolder
from engine.run.journal import Journal
from engine.run.metrics import read_metrics
from engine.trainer import loop
from engine.trainer.loop import Trainer
from engine.trainer.model import reserve_host
from engine.trainer.rank import explain
from tests.planner.samples import by_hand
from tests.refusals import refused
from tests.run.damage import TOKEN, alone


class Host:
    """Offload on a host that gives a rank at most `bytes_`."""

    def __init__(self, bytes_: int) -> None:
        self.bytes = bytes_

    def make_room(self, ratio: float, tokens: int, micro_batches: int = 1) -> None:
        if ratio * tokens > self.bytes:
            raise MemoryFitError(f"the host gave no {ratio * tokens:.0f} bytes", hint="less")


@pytest.mark.parametrize(("step", "before"), [(0, 0), (7, 0), (7, 5), (7, 7)])
def test_a_host_with_too_little_memory_ends_all_ranks_after_a_checkpoint(step: int, before: int) -> None:
    """Rank 1 gets less than its second micro-batch takes: both stop before the step, and name the rank.

    A checkpoint of the step that is there already is not written again: a kill in between would leave none.
    """
    plan = by_hand([30, 20, 40], [(0,), (1,), (1,)], [[[0]], [[1], [2]]])
    plan.offload[:] = 1_000_000
    problems = [reserve_host(plan, rank, Host(35)) for rank in range(2)]  # type: ignore[arg-type]
    assert problems[0] is None and problems[1] is not None
    control = SimpleNamespace(gather=lambda problem: [asdict(problems[1])], largest=lambda *values: list(values))
    saved: list[int] = []
    for rank in range(2):
        trainer = Trainer.__new__(Trainer)
        trainer.step, trainer.saved, trainer.control = step, before, control  # type: ignore[assignment]
        trainer.writer, trainer.journal = Mock(), Mock()
        trainer.groups = SimpleNamespace(hdp_rank=rank)  # type: ignore[assignment]
        trainer.context = SimpleNamespace(offload=Host(35), pipeline=None)  # type: ignore[assignment]
        trainer.save = lambda: saved.append(step)  # type: ignore[method-assign]
        with refused(MemoryFitError) as found:
            trainer._reserve_host(plan)
        assert found[0].message.startswith("rank 1: ")
        trainer.writer.wait.assert_called_once()
        trainer.control = Control(rank)
        for enough in (None, Host(40)):
            trainer.context = SimpleNamespace(offload=enough, pipeline=None)  # type: ignore[assignment]
            trainer._reserve_host(plan)
        trainer.control = control  # type: ignore[assignment]
    assert saved == [step] * (2 if step > before else 0)


def test_the_host_memory_of_a_step_is_allocated_before_its_first_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocating pinned memory waits for the GPU."""
    plan, order = by_hand([30], [(0,)], [[[0]]]), list[Any]()

    def run_step(plan: StepPlan, *rest: Any) -> None:
        order.append(("run", plan))
        raise RuntimeError("the rest of the step is left out")

    monkeypatch.setattr(loop, "reserve_host", lambda plan, *rest: order.append(("reserve", plan, *rest)))
    monkeypatch.setattr(loop, "run_step", run_step)
    trainer: Any = Trainer.__new__(Trainer)
    trainer.step, trainer.config, trainer.writer = 0, SimpleNamespace(run=SimpleNamespace(steps=1)), Mock()
    trainer.journal = Mock()
    planned = SimpleNamespace(plan=plan, loss_tokens=30, step_s=2.5, ended=None)
    trainer.data = SimpleNamespace(take=lambda: planned, input_reader=lambda planned: None)
    trainer.control = Control(3)
    trainer.groups, trainer.context = SimpleNamespace(hdp_rank=3), SimpleNamespace(offload="offload", pipeline=None)
    trainer.engine = SimpleNamespace(forward=None, backward=lambda: None)
    with pytest.raises(RuntimeError):
        trainer.one_step(lambda: False)
    assert order == [("reserve", plan, 3, "offload", 0), ("run", plan)]


def test_a_trainer_meets_its_neighbours_before_any_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise NCCL would connect them in the middle of the first steps, while other ranks wait."""
    met: list[Any] = []
    context = SimpleNamespace(comm=SimpleNamespace(meet=lambda peers, device: met.append((peers, device))))
    monkeypatch.setattr(loop, "build", lambda *given: (None, None, context))
    monkeypatch.setattr(loop, "Trace", lambda *given: None)
    monkeypatch.setitem(RUNTIMES, "local", lambda *given: SimpleNamespace())
    cpu = torch.device("cpu")
    (tmp_path / "summary.json").write_text('{"fingerprints": {"data": "f"}}')
    control = SimpleNamespace(gather=lambda value: [TOKEN], collect=None)
    groups: Any = SimpleNamespace(rank=1, hdp_rank=1, local_rank=1, control=control, device=cpu, mesh=Mesh(8))
    Trainer(RunFolder(tmp_path), load(["recipe=quickstart", "cluster.ranks_per_node=8"]), groups)
    assert met == [([0, 2, 3, 7], cpu)]


@pytest.mark.parametrize(
    ("overrides", "sets", "empty"),
    [
        ([], [], ["data"]),
        ([], ["data"], []),
        (["data.validation_tokens=0"], [], []),
        (["data.validation_share=0"], [], []),
        (["data.mix={web: 1, code: 2, held: 0}"], ["code"], ["web", "held"]),
        (["data.mix={web: 1, code: 2, held: 0}", "data.validation_share=0"], [], ["held"]),
    ],
)
def test_metrics_name_the_sources_whose_validation_set_is_empty(
    overrides: list[str], sets: list[str], empty: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that should have one. Otherwise a user would look for validation losses in vain."""
    of_sets = {name: SimpleNamespace(plan=SimpleNamespace(digest="0")) for name in sets}
    monkeypatch.setattr(loop, "build", lambda *given: (None, None, SimpleNamespace(comm=Mock())))
    monkeypatch.setattr(loop, "Trace", Mock())
    monkeypatch.setitem(
        RUNTIMES, "local", lambda *given: SimpleNamespace(validation=lambda order: of_sets, request=Mock())
    )
    (tmp_path / "summary.json").write_text('{"fingerprints": {}}')
    if any("mix" in one for one in overrides):
        overrides = [*overrides, *(f"data.sources.{name}.path={name}.jsonl" for name in ("web", "code", "held"))]
    groups: Any = SimpleNamespace(rank=0, hdp_rank=0, local_rank=0, control=Control(0), device=None, mesh=Mesh(2))
    begun = Trainer(RunFolder(tmp_path), load(["recipe=quickstart", *overrides]), groups)
    begun.begin(None)
    assert begun.unvalidated == empty
    trainer = trainer_without_a_model(tmp_path, monkeypatch)
    trainer.data, trainer.unvalidated = Ahead(2), begun.unvalidated
    trainer.one_step(lambda: False)
    trainer.journal.wait()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line.get("unvalidated", []) == empty


@pytest.mark.parametrize("full", [False, True])
def test_a_step_is_in_the_ledger_before_it_has_metrics(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with metrics is complete in the ledger. If the disk is full, it has none, and storage is the cause."""
    trainer, order = trainer_without_a_model(tmp_path, monkeypatch), list[str]()

    def record(*step: Any) -> None:
        order.append("ledger")
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    trainer.data = Ahead(2, ["a document"], [{BlockId("web", 1): 3}, {BlockId("web", 1): 3, BlockId("web", 2): 4}])
    trainer.ledger = SimpleNamespace(record=record)
    trainer.quarantine = SimpleNamespace(add=lambda step, found: order.append("quarantine") or len(found))
    if full:
        trainer.one_step(lambda: False)
        with pytest.raises(OSError) as caught:
            trainer.journal.wait()
        assert explain(caught.value).code == ExitCode.STORAGE
        assert order == ["ledger"] and not (tmp_path / "metrics.jsonl").exists()
    else:
        assert trainer.one_step(lambda: False) is False
        trainer.journal.wait()
        (line,) = read_metrics(tmp_path / "metrics.jsonl")
        assert order == ["ledger", "quarantine"] and (line["step"], line["left_out"]) == (1, 1)
        trainer.one_step(lambda: False)
        trainer.journal.wait()
        lines = read_metrics(tmp_path / "metrics.jsonl")
        assert [line["dropped"] for line in lines] == [3, 7], "a block that is opened again counts once"


@pytest.mark.parametrize("peak", [None, 4e9])
def test_metrics_have_the_mfu_where_the_peak_is_known_and_the_share_of_unsplit_tokens(
    peak: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_without_a_model(tmp_path, monkeypatch)
    trainer.data, trainer.peak = Ahead(2), peak
    trainer.one_step(lambda: False)
    trainer.journal.wait()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["mfu"] == (None if peak is None else 6e9 / (4e9 * line["step_s"])) and line["unsplit"] == 1.0
    first = ["step", "loss", "tokens", "tokens_per_s", "step_s", "plan_wait_s", "data_wait_s", "max_degree", "balance"]
    assert list(line)[:13] == [*first, "grad_norm", "lr", "mfu", "unsplit"]


@pytest.mark.parametrize("last", [1, 3, 4, 6])
def test_a_run_without_more_documents_validates_and_saves_at_its_end(
    last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that reaches run.steps, which is 6 here: validation every 4 steps, a checkpoint every 3."""
    trainer, saved = trainer_without_a_model(tmp_path, monkeypatch), list[int]()
    trainer.data = Ahead(last)
    monkeypatch.setattr(loop, "evaluate", lambda *rest: torch.tensor(60.0))
    trainer.validation = {"data": trainer.data.take()}
    trainer.save = lambda: saved.append(trainer.step)
    assert trainer.run(lambda: False) == ExitCode.OK
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [*range(1, last + 1)]
    assert [line["step"] for line in lines if line.get("validation_loss") == 2.0] == sorted(
        {4, last} - {*range(last + 1, 5)}
    )
    assert saved == sorted({3, last} - {*range(last + 1, 4)})
    assert [line.get("ended") for line in lines] == [None] * (last - 1) + (["why"] if last < 6 else [None])
    assert trainer.data.asked == last - 1, "there is nothing to plan after the last step"


def test_a_step_is_measured_from_the_plan_to_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent does so. Neither the wait for the plan, nor the validation and checkpoint that follow, are among it."""
    trainer, said = trainer_without_a_model(tmp_path, monkeypatch), Mock()
    trainer.data, trainer.save = Ahead(1), lambda: progress.report("save")
    trainer._validate = lambda: progress.report("validate") or {}
    trainer.step = 3
    monkeypatch.setattr(progress._place, "link", said)
    trainer.run(lambda: False)
    told = [call.args[0] for call in said.send.mock_calls]
    phases = [getattr(message, "phase", "planned") for message in told]
    assert phases == ["plan", "planned", "reduce", "log", "validate", "save", "save"]
    assert told[1] == Planned(2.5) and told[3] == At(4, "log", 0)


class Copy:
    """A snapshot whose files are written when `go` is set."""

    def __init__(self, short: int = 0) -> None:
        self.short, self.go = short, threading.Event()

    def write_each(self, folder: Path, share: Share) -> list[Range]:
        assert self.go.wait(20)
        (folder / "a.pt").write_bytes(b"a")
        return [Range("a.pt", 0, 1)]


@pytest.mark.parametrize(("short", "copies"), [(0, True), (3000, True), (0, False)])
def test_training_goes_on_while_a_checkpoint_is_written_unless_the_host_is_too_small(
    short: int, copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`short` may be that of another rank: all wait, because its states would change. The next line says it."""
    trainer, copy, asked = trainer_without_a_model(tmp_path, monkeypatch), Copy(), list[bool]()
    trainer.data, trainer.copies = Ahead(6), copies
    trainer.folder.checkpoints.mkdir()
    trainer.writer = BackgroundWriter(trainer.folder.checkpoints, 0, TOKEN, alone)
    trainer.groups.mesh = SimpleNamespace(ranks=1, tp=1, pp=1)
    trainer.engine.snapshot = lambda copies: asked.append(copies) or copy
    trainer.control.largest = lambda *own: [max(own[0], short), *own[1:]]
    trainer.one_step(lambda: False)
    if short or not copies:
        timer = threading.Timer(1.5, copy.go.set)
        timer.start()
    trainer.save()
    assert asked == [copies]
    assert len(newest_first(trainer.folder.checkpoints)) == (1 if short or not copies else 0)
    trainer.control.largest = lambda *own: list(own)
    trainer.one_step(lambda: False)
    trainer.one_step(lambda: False)
    copy.go.set()
    trainer._finish_save()
    (written,) = newest_first(trainer.folder.checkpoints)
    assert read(written).step == 1
    _, line, after = read_metrics(tmp_path / "metrics.jsonl")
    assert line.get("copy_short") == (short or None) and (line["save_s"] > 1.0) == bool(short or not copies)
    assert "save_s" not in after


def test_a_failed_write_ends_the_run_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on without checkpoints would lose all its work at the next failure."""
    trainer = trainer_without_a_model(tmp_path, monkeypatch)
    trainer.data, trainer.groups.mesh = Ahead(6), SimpleNamespace(ranks=1, tp=1, pp=1)

    def full(folder: Path, share: Share) -> list[Range]:
        raise OSError(errno.ENOSPC, "No space left on device")

    def step(rate: float) -> float:
        """Take longer than the write."""
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        return 1.0

    trainer.engine.snapshot, trainer.engine.step = lambda copies: SimpleNamespace(short=0, write_each=full), step
    with refused(StorageError, f"....writing-step-00000003.{TOKEN}"):
        trainer.run(lambda: False)
    assert 3 <= trainer.step < 6


def test_a_checkpoint_that_has_filled_the_disk_is_the_cause_of_the_next_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step's own files cannot be written either. The checkpoint's error names the bytes that it needs."""
    trainer = trainer_without_a_model(tmp_path, monkeypatch)
    trainer.data, failed = Ahead(6), StorageError("a checkpoint could not be written: 3 GiB were written")

    def record(*step: Any) -> None:
        trainer.writer._error = failed
        raise OSError(errno.ENOSPC, "No space left on device")

    trainer.ledger = SimpleNamespace(record=record)
    with pytest.raises(StorageError) as caught:
        trainer.run(lambda: False)
    assert caught.value is failed


def test_a_rank_leaves_when_all_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that ends early would end the others, and rank 0 may still be writing the last checkpoint."""
    order = Mock()
    trainer = trainer_without_a_model(tmp_path, monkeypatch)
    trainer.data, trainer.save = Ahead(1), order.save
    trainer.writer = SimpleNamespace(check=lambda: None, wait=order.wait)
    assert trainer.run(lambda: False) == ExitCode.OK
    trainer.control.largest = order.meet
    trainer._finish_save()
    assert [call[0] for call in order.mock_calls] == ["save", "wait", "wait", "meet"]
    monkeypatch.setattr(loop, "diverged", order.error)
    order.reset_mock()
    trainer._diverged(loss=math.nan)
    assert [call[0] for call in order.mock_calls] == ["wait", "meet", "error"], "its hint names the newest checkpoint"


class Ahead:
    """Plans of a run whose documents last for `steps` steps. `asked` counts the plans after the first."""

    def __init__(self, steps: int, unusable: Sequence[str] = (), dropped: Sequence[Mapping[BlockId, int]] = ()) -> None:
        self.steps, self.unusable, self.dropped, self.asked = steps, unusable, dropped, 0

    def request(self, cursor: Any) -> None:
        self.asked += 1

    def input_reader(self, planned: Any) -> None:
        """There is nothing to read."""

    def take(self) -> Any:
        plan, cursor = by_hand([30], [(0,)], [[[0]]]), Cursor()
        ended = "why" if self.asked + 1 == self.steps else None
        of_plan = {"plan": plan, "whole": plan, "loss_tokens": 30, "balance": 1.0, "step_s": 2.5, "flops": 6e9}
        of_plan |= {"unusable": self.unusable, "dropped": self.dropped[self.asked] if self.dropped else {}}
        return SimpleNamespace(**of_plan, table=None, after=cursor, ended=ended, packed={})


def trainer_without_a_model(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer of six steps that computes nothing. It has neither plans nor a ledger of its own."""
    monkeypatch.setattr(loop, "run_step", lambda *rest: (torch.tensor(30.0), SimpleNamespace(data_wait_s=0.0)))
    monkeypatch.setattr(loop, "peak_bytes", lambda device: None)
    monkeypatch.setattr(loop, "learning_rate", lambda *rest: 1e-3)
    every = ["run.steps=6", "run.validate_every=4", "run.checkpoint_every=3"]
    trainer: Any = Trainer.__new__(Trainer)
    trainer.step, trainer.ended, trainer.config = 0, None, load(["recipe=quickstart", *every])
    trainer.folder, trainer.validation, trainer.unvalidated = RunFolder(root), {}, []
    trainer.model = SimpleNamespace(end_step=lambda *rest: {})
    trainer.control, trainer.context = Control(0), SimpleNamespace(offload=None)
    trainer.groups = SimpleNamespace(rank=0, device=None, sum=lambda values: values)
    trainer.engine = SimpleNamespace(forward=None, backward=lambda: None, step=lambda rate: 1.0, module=None)
    trainer.engine.reserve_snapshot = lambda: None
    trainer.data = SimpleNamespace(input_reader=lambda planned: None)
    trainer.trace = SimpleNamespace(record=lambda *rest: None)
    trainer.dropped = Dropped()
    trainer.skipped, trainer.pace = 0, SimpleNamespace(of_steps=lambda *rest: None)
    trainer.ledger = SimpleNamespace(record=lambda *rest: None)
    trainer.quarantine = SimpleNamespace(add=lambda step, found: 0)
    trainer.journal = Journal()
    trainer.writer, trainer.saved, trainer.of_save, trainer.copies = (
        BackgroundWriter(root, 0, TOKEN, alone),
        0,
        {},
        True,
    )
    trainer.peak, trainer.held = None, SimpleNamespace(check=lambda: None)
    trainer.fingerprints, trainer.tokenizer, trainer.cursor = {}, None, Cursor()
    return trainer


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_run_whose_folder_is_gone_ends_and_writes_nothing_at_its_place(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint would make a new folder there, which could not be resumed, and the run would end with success."""
    root = tmp_path / "run"
    (root / "checkpoints").mkdir(parents=True)
    (root / "resolved.yaml").touch()
    trainer = trainer_without_a_model(root, monkeypatch)
    trainer.held, trainer.data = Held(trainer.folder), Ahead(6)

    def gone() -> bool:
        if trainer.step == 3:
            root.rename(tmp_path / "moved") if how == "moved" else shutil.rmtree(root)
        return False

    with refused(RunFolderError, root):
        trainer.run(gone)
    assert not root.exists()
