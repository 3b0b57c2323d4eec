"""A run starts from imported weights, and only where they fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from engine.config.load import load
from engine.config.schema import Config
from engine.data.tokenizers.load import open_tokenizer
from engine.errors import ConfigError, DataError
from engine.launch.run import train
from tests.data.tokenizers.chat_folder import chat_folder
from tests.refusals import refused
from tests.trainer.worlds import in_worlds
from tests.weights.folders import SHAPE, llama, saved

encode = open_tokenizer("bytes").document

AWAY = "zero.stage=3 zero.weights_on_host=true optimizer.on_host=true mlp_tile=64"
TEXT = b"To be, or not to be, that is the question: whether it is nobler in the mind to suffer. " * 3


def run_of(tmp_path: Path, *overrides: str) -> Config:
    """Load the config of a run of one step on one document."""
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "only.py").write_bytes(TEXT)
    places = [f"data.path={tmp_path / 'data'}", f"run.out={tmp_path / 'run'}", f"run.weights={tmp_path / 'theirs'}"]
    sizes = ["context=512", "capacity=256", "batch_tokens=512", "run.steps=1", "data.validation_share=0"]
    return load(["recipe=quickstart", *SHAPE, *places, *sizes, *overrides])


@pytest.mark.world
@pytest.mark.parametrize(
    ("memory", "launched"),
    [
        pytest.param("zero.stage=1", False, id="zero1"),
        pytest.param("zero.stage=1", True, id="launched", marks=pytest.mark.slow),  # ranks import everything
        pytest.param("zero.stage=3", False, id="zero3"),
        pytest.param(AWAY, False, id="host"),
    ],
)
def test_the_first_loss_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, launched: bool) -> None:
    """Each of two ranks reads the weights, or the first reads for both; the document is on a ring of both."""
    if not launched:
        in_worlds(monkeypatch, 1)
    theirs = llama()
    saved(theirs, tmp_path / "theirs", "30KB")
    train(run_of(tmp_path, *memory.split()), say=lambda line: None)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    tokens = torch.from_numpy(encode(TEXT)).long()[None]
    assert line["max_degree"] == 2
    assert line["loss"] == pytest.approx(theirs(tokens, labels=tokens).loss.item(), rel=1e-5)
    shutil.rmtree(tmp_path / "theirs")
    in_worlds(monkeypatch, 1)
    train(run_of(tmp_path, *memory.split()), say=lambda line: None)  # resumes from its checkpoint without them


def test_weights_that_do_not_fit_are_reported_before_any_rank_starts(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "theirs")
    for dry_run in (True, False):
        with pytest.raises(DataError) as caught:
            train(run_of(tmp_path, "model.ffn=64"), dry_run=dry_run, say=lambda line: None)
        assert caught.value.problems[0].key == "model.ffn"
        assert len(caught.value.problems) == 7
    assert not (tmp_path / "run").exists()


def test_weights_of_another_tokenizer_are_refused_before_any_rank_starts(tmp_path: Path) -> None:
    """And accepted with the way out that the refusal names."""
    chat_folder(saved(llama(vocab_size=400), tmp_path / "theirs"), None)
    with refused(ConfigError, "data.tokenizer=bytes") as problems:
        train(run_of(tmp_path, "model.vocab=400"), dry_run=True, say=lambda line: None)
    (way_out,) = [word.rstrip(";") for word in str(problems[0].hint).split() if "data.tokenizer" in word]
    train(run_of(tmp_path, "model.vocab=400", way_out), dry_run=True, say=lambda line: None)


def test_other_rotary_angles_are_said(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "theirs")
    said: list[str] = []
    train(run_of(tmp_path, "model.rope_theta=5e5"), dry_run=True, say=said.append)
    of_weights = [line for line in said if "weights" in line]  # other lines warn of the tiny corpus
    assert of_weights == ["the weights were made with model.rope_theta=10000.0; this run has 500000.0"]
