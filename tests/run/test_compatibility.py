from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import versions
from engine.config.keys import leaves
from engine.config.load import load
from engine.config.versions import Change
from engine.errors import CheckpointError, DataError
from engine.run.checkpoints import TrainState
from engine.run.compatibility import check_compatible, check_fingerprints, must_match, same_run
from tests.refusals import refused

CHECKPOINT = Path("step-00000001")


def state() -> TrainState:
    """The state of a quickstart as read from its manifest."""
    kept = json.loads(json.dumps(must_match(load(["recipe=quickstart"]))))
    return TrainState(step=1, cursor={}, ranks=2, fingerprints={"data": "f"}, must_match=kept)


@pytest.mark.parametrize(
    "change",
    [
        *("optimizer.lr=0.5", "run.steps=7", "batch_tokens=64K", "planner=naive", "model.name=other", "run.out=new"),
        *("zero.stage=3", "optimizer.on_host=true", "cluster.ranks_per_node=5", "cluster.nodes=3"),
    ],
)
def test_rates_batches_plans_ranks_and_stages_may_change(change: str) -> None:
    check_compatible(CHECKPOINT, state(), load(["recipe=quickstart", change]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("run.seed=9", "run.seed: "),
        ("model.layers=7", "model.layers: "),
        ("model.rope_theta=7", "model.rope_theta: "),
        ("dtype=bf16", "dtype: fp32 -> bf16"),
        ("optimizer.name=sgd", "optimizer.name: adamw -> sgd"),
        ("data.validation_share=0.5", "data.validation_share: "),
    ],
)
def test_values_that_tensors_or_document_order_depend_on_must_match(change: str, expected: str) -> None:
    with refused(CheckpointError, CHECKPOINT) as problems:
        check_compatible(CHECKPOINT, state(), load(["recipe=quickstart", change]))
    assert expected in problems[0].message


def test_biases_belong_to_their_rate() -> None:
    experts = ["recipe=quickstart", "model.family=mixtral", "model.experts=4", "balance.by=bias"]
    kept = must_match(load([*experts, "balance.bias_rate=0.1"]))
    before = TrainState(step=1, cursor={}, ranks=2, fingerprints={"data": "f"}, must_match=kept)
    check_compatible(CHECKPOINT, before, load([*experts, "balance.bias_rate=0.1", "balance.z_weight=1"]))
    for change, expected in (
        ("balance.bias_rate=0.2", "balance.bias_rate: 0.1 -> 0.2"),
        ("balance.by=loss", "balance.by: bias -> loss"),
        ("model.experts=1 model.family=llama", "model.family: mixtral -> llama; model.experts: 4 -> 1"),
    ):
        with refused(CheckpointError, CHECKPOINT) as problems:
            check_compatible(CHECKPOINT, before, load([*experts, *change.split()]))
        assert problems[0].message.endswith(f": {expected}")
    without = replace(before, must_match=must_match(load([*experts, "balance.by=loss"])))
    with refused(CheckpointError, CHECKPOINT) as problems:
        check_compatible(CHECKPOINT, without, load(experts))
    assert problems[0].message.endswith(": balance.by: not bias -> bias")


def tokenizer(name: str, fingerprint: str, eos: int | None = 2) -> dict[str, Any]:
    return {"name": name, "bos": 1, "eos": eos, "fingerprint": fingerprint * 32}


@pytest.mark.parametrize(
    ("now", "shown"),
    [
        (tokenizer("b/t.json", "a"), None),  # moved
        (None, None),  # token files alone
        (tokenizer("b/t.json", "b"), "b/t.json (BOS 1, EOS 2, fingerprint bbbbbbbbbbbb)"),
        (tokenizer("a/t.json", "b"), "a/t.json (BOS 1, EOS 2, fingerprint bbbbbbbbbbbb)"),
        (tokenizer("a/t.json", "c", eos=None), "a/t.json (BOS 1, EOS none, fingerprint cccccccccccc)"),
    ],
)
def test_tokenizers_are_compared_by_fingerprint_and_shown_by_name(
    now: dict[str, Any] | None, shown: str | None
) -> None:
    config, before = load(["recipe=quickstart"]), replace(state(), tokenizer=tokenizer("a/t.json", "a"))
    check_compatible(CHECKPOINT, state(), config, now)
    if shown is None:
        return check_compatible(CHECKPOINT, before, config, now)
    with refused(CheckpointError, CHECKPOINT) as problems:
        check_compatible(CHECKPOINT, before, config, now)
    was = "a/t.json (BOS 1, EOS 2, fingerprint aaaaaaaaaaaa)"
    assert problems[0].message.endswith(f": data.tokenizer: {was} -> {shown}")


def test_of_older_checkpoints_tokenizers_are_compared_by_name() -> None:
    """They do not have its fingerprint. That of their documents covers the content of a file with the same name."""
    older = replace(state(), must_match=state().must_match | {"data.tokenizer": "bytes"})
    check_compatible(CHECKPOINT, older, load(["recipe=quickstart"]), tokenizer("bytes", "a"))
    with refused(CheckpointError, CHECKPOINT) as problems:
        check_compatible(CHECKPOINT, older, load(["recipe=quickstart", "data.tokenizer=t.json"]), tokenizer("t", "a"))
    assert problems[0].message.endswith(": data.tokenizer: bytes -> t.json")


def test_a_changed_rotary_scaling_is_reported_by_its_keys() -> None:
    with refused(CheckpointError, CHECKPOINT) as problems:
        check_compatible(CHECKPOINT, state(), load(["model.rope.kind=linear", "model.rope.factor=2"]))
    assert ": model.rope.kind: none -> linear; model.rope.factor: null -> 2" in problems[0].message


def test_changed_documents_are_refused() -> None:
    check_fingerprints({"data": "a" * 32}, {"data": "a" * 32})
    for name, key in (("data", "data.path"), ("web", "data.sources.web.path")):
        with refused(DataError, key) as problems:
            check_fingerprints({name: "b" * 32, "other": "c"}, {name: "a" * 32, "other": "c"})
        assert "b" * 12 in problems[0].message and "a" * 12 in problems[0].message
        assert "--resume never" in str(problems[0].hint)
    with refused(DataError, "data.path") as problems:
        check_fingerprints({"data": "b"}, {"data": "a"}, {"data": "labels, attention_mask"})
    assert "attention_mask" in problems[0].message


def test_sources_may_be_added_and_left_out() -> None:
    check_fingerprints({"web": "a", "new": "b"}, {"web": "a", "old": "c"})
    check_fingerprints({"web": "a", "copy": "a"}, {"web": "a"})


@pytest.mark.parametrize(("old", "new", "key"), [("web", "pages", "sources.pages.path"), ("web", "data", "path")])
def test_a_source_with_another_name_is_refused_with_both_names(old: str, new: str, key: str) -> None:
    """It would begin again at its first document, without a word."""
    with refused(DataError, f"data.{key}") as problems:
        check_fingerprints({"code": "b", new: "a"}, {old: "a", "code": "b"})
    assert f"source {new} " in problems[0].message and f"source {old} " in problems[0].message
    assert f"data.sources.{old} " in str(problems[0].hint)


def test_older_checkpoints_had_to_keep_the_stage() -> None:
    older = replace(state(), must_match=state().must_match | {"zero.stage": 2, "optimizer.on_host": True})
    check_compatible(CHECKPOINT, older, load(["recipe=quickstart"]))


def test_a_checkpoint_of_an_earlier_format_stands_for_the_values_that_its_run_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lacks keys that were added since, and has keys that are gone."""
    config = load(["recipe=quickstart"])
    kept = must_match(config) | {"model.old": 1}
    theta = kept.pop("model.rope_theta")
    before = replace(state(), must_match=kept)
    row = lambda old: theta if old["model.hidden"] == config.model.hidden else 1  # noqa: E731
    change = Change(added={"model.rope_theta": row, "data.separator": "x"}, gone={"model.old": "model.rope_theta"})
    monkeypatch.setattr(versions, "CHANGES", {2: change})
    check_compatible(CHECKPOINT, before, config)
    with refused(CheckpointError, CHECKPOINT) as problems:
        check_compatible(CHECKPOINT, before, load(["recipe=quickstart", "model.rope_theta=7"]))
    assert problems[0].message.endswith(": model.rope_theta: 10000.0 -> 7.0")


def test_in_its_own_folder_a_run_keeps_what_it_learns_from() -> None:
    """Every key of the config: those that may change, and of the data those that may if a checkpoint is compared.

    Without one, a user may still choose another cache after a full disk, or leave out documents that stopped the run.
    """
    free = {key for key in leaves() if same_run(key, has_checkpoint=False)}
    sections = ("cluster.", "k8s.", "lengths.", "offload.", "parallel.", "planner.", "slurm.", "zero.")
    assert {key for key in leaves() if key.startswith(sections)} < free
    assert {key for key in free if not key.startswith(sections)} == {
        *("capacity", "compile", "mlp_tile", "model.name", "optimizer.on_host", "recipe", "recompute"),
        *("run.checkpoint_every", "run.keep_best", "run.keep_checkpoints", "run.keep_every", "run.out"),
        *("run.remote", "run.restarts", "run.steps", "run.trackers", "run.validate_every"),
        *("run.chaos", "run.max_skips", "run.notice_file", "run.on_nan"),
        *("data.cache", "data.loaders", "data.quarantine_after", "data.runtime", "data.spool"),
        *(f"data.ray.{name}" for name in ("address", "deadline", "loaders", "memory", "standbys")),
    }
    of_data = {key for key in leaves() if same_run(key, has_checkpoint=True)} - free
    assert of_data == {key for key in leaves() if key.startswith("data.")} - free != set()
