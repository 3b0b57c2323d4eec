"""Where a run goes on: documents, sources and tokenizers must be those of its checkpoint, or its user is told."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.data.ledger import Ledger
from engine.data.overview import Corpora, tokenizer_facts
from engine.data.pack import pack
from engine.data.steps import Cursor
from engine.errors import CheckpointError, ConfigError, DataError
from engine.job import Job
from engine.launch.launch import Launch
from engine.launch.prepare import (
    Start,
    _changed_documents,
    plan_start,
    write_facts,
)
from engine.launch.say import Say
from engine.run.checkpoints import TrainState, newest_first, read_state
from engine.run.compatibility import must_match
from engine.run.folder import RunFolder
from tests.data.past_run import run_of
from tests.data.token_files import megatron, written
from tests.data.tokenizers.chat_folder import CHATML, chat_folder
from tests.refusals import refused
from tests.run.damage import write_all


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
