from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.config.schema import Config
from engine.data.history import History
from engine.data.ledger import SHARD, Ledger
from engine.data.overview import Corpora
from engine.data.steps import Cursor
from engine.errors import ConfigError, DataError
from engine.job import Job
from engine.planner.make import plan_step
from engine.run import metrics
from engine.run.folder import RunFolder
from tests.data.past_run import run_of
from tests.refusals import refused

SIZES = ["context=16", "capacity=16", "batch_tokens=64", "cluster.ranks_per_node=2", "data.validation_share=0.2"]


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunFolder, Config]:
    """Eight steps of a mixture of lines and texts."""
    (tmp_path / "code").mkdir()
    for number in range(30):
        (tmp_path / "code" / f"{number}.py").write_text("x" * (number + 1))
    lines = [json.dumps({"text": f"line {number} " * (number % 5)}) for number in range(60)]
    (tmp_path / "web.jsonl").write_text("\n".join(lines))
    web = f"web:{{path:'{tmp_path / 'web.jsonl'}',format:jsonl}}"
    code = f"code:{{path:'{tmp_path / 'code'}',format:folder,pattern:'*.py'}}"
    mix = [f"data.sources={{{web},{code}}}", "data.mix={web:3,code:1}"]
    return run_of(tmp_path, *mix, *SIZES, steps=8)


def test_a_step_has_the_documents_that_training_had(run: tuple[RunFolder, Config]) -> None:
    """The texts at their places have the lengths of the sequences, and the ranks are those of the plan."""
    folder, config = run
    history, corpora, cursor = History.of(folder.root), Corpora(config), Cursor()
    for step in range(1, 9):
        found = corpora.steps.next(cursor)
        assert found is not None
        table, cursor = found
        plan, traced = plan_step(table.length, Job(config).settings), history.trace_step(step)
        assert [one.length for one in traced] == table.length.tolist()
        assert [one.loss_tokens for one in traced] == table.loss_tokens.tolist()
        rings = [plan.ring_ranks[a:b].tolist() for a, b in zip(plan.ring_start, plan.ring_start[1:], strict=False)]
        assert [one.ranks for one in traced] == rings
        for one in traced:
            assert one.step == step and one.place.problem is None and one.place.place is not None
            if one.document.source == "code":
                text = Path(one.place.place).read_text()
            else:
                path, _, line = one.place.place.rpartition(":")
                text = json.loads(Path(path).read_text().splitlines()[int(line) - 1])["text"]
            assert one.length == min(16, len(text) + 1 - one.start)


def test_the_steps_of_a_document_are_those_that_have_it(run: tuple[RunFolder, Config]) -> None:
    """By its ID, by its place, and by a file that has it; each row is as in the trace of its step."""
    history = History.of(run[0].root)
    steps = [one for step in range(1, 9) for one in history.trace_step(step)]
    assert len({one.document for one in steps}) > 20 and any(one.start for one in steps)
    for document in {one.document for one in steps}:
        expected = [one for one in steps if one.document == document]
        for text in (document.id, str(expected[0].place.place)):
            assert history.trace_document(text) == (expected, None)
    web = str(run[0].root.parent / "web.jsonl")
    assert history.trace_document(web)[0] == [one for one in steps if one.document.source == "web"]


def test_documents_that_are_in_no_step(run: tuple[RunFolder, Config]) -> None:
    history = History.of(run[0].root)
    web = str(run[0].root.parent / "web.jsonl")
    assert history.trace_document(f"{web}:1") == ([], "it has no token to predict")
    reasons = [history.trace_document(f"{web}:{line}")[1] for line in range(1, 61)]
    assert reasons.count("it is held out for validation") > 3 and reasons.count(None) > 20
    assert history.trace_document("code:0:999") == ([], None)
    for document in ("other:0:1", f"{web}:61", "nowhere.txt"):
        with refused(ConfigError, "--document"):
            history.trace_document(document)


def test_steps_that_are_not_finished_or_were_removed(run: tuple[RunFolder, Config]) -> None:
    folder, _ = run
    for step in (-1, 0, 9):
        with refused(ConfigError, "--step") as problems:
            History.of(folder.root).trace_step(step)
        assert f"step {step}" in problems[0].message
    step_5 = History.of(folder.root).trace_step(5)
    metrics.cut_back(folder.metrics, 4)  # step 5 failed when all its documents were in the ledger
    assert History.of(folder.root).trace_step(5) == step_5
    with refused(ConfigError, "--step") as problems:
        History.of(folder.root).trace_step(6)
    assert "step 6" in problems[0].message
    shards = folder.ledger / "ranks-00000000.bin"
    whole = shards.read_bytes()
    (folder.ledger / "hashes-00000000.bin").unlink()
    shards.write_bytes(whole[: len(Ledger(folder.ledger).shards(1)) * SHARD.itemsize])  # a crash has lost the rest
    with refused(ConfigError, "--step") as problems:
        History.of(folder.root).trace_step(5)
    assert "step 5" in problems[0].message
    shards.write_bytes(whole)
    assert {one.step for one in History.of(folder.root).trace_document(str(folder.root.parent / "web.jsonl"))[0]} == {
        1,
        2,
        3,
        4,
    }
    path = folder.ledger / "documents-00000000.bin"
    rows = Ledger(folder.ledger).documents(3).tobytes()
    path.write_bytes(rows)
    with refused(DataError, ".../run/ledger") as problems:
        History.of(folder.root).trace_step(2)
    assert "step 3" in problems[0].message and "step 2" in problems[0].message
    path.unlink()
    with refused(DataError, ".../run/ledger") as problems:
        History.of(folder.root).trace_step(2)
    assert "step 2" in problems[0].message
    folder.metrics.unlink()
    with refused(ConfigError, "--step") as problems:
        History.of(folder.root).trace_step(2)
    assert "step 2" in problems[0].message


def test_a_source_that_cannot_be_opened_does_not_hide_the_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "vocabulary").mkdir()
    sizes = ["context=16", "capacity=16", "batch_tokens=64"]
    folder, _ = run_of(tmp_path, "data=jsonl", f"data.path={tmp_path / 'a.jsonl'}", *sizes, steps=1)
    expected = [one.document for one in History.of(folder.root).trace_step(1)]
    text = folder.resolved.read_text()
    folder.resolved.write_text(text.replace("tokenizer: bytes", "tokenizer: /nowhere/tokenizer.json"))
    assert all(one.place.place for one in History.of(folder.root).trace_step(1)), "the blocks are packed"
    shutil.rmtree(tmp_path / "cache")
    traced = History.of(folder.root).trace_step(1)
    assert [one.document for one in traced] == expected
    assert {one.place for one in traced} == {(None, "/nowhere/tokenizer.json: no such tokenizer")}


def test_other_folders_are_no_runs(tmp_path: Path) -> None:
    with refused(ConfigError, tmp_path) as problems:
        History.of(tmp_path)
    assert "resolved.yaml" in problems[0].message
