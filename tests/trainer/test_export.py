"""Exported Hugging Face weights are those of the trained model, to the last bit, and transformers loads them.

If these fail, a trained model is useless to everybody else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from engine.config.load import resolved_yaml
from engine.config.schema import Config
from engine.dtypes import DTYPES
from engine.errors import CheckpointError, ConfigError
from engine.family.families import parameters_of
from engine.models.build import build_model
from engine.models.common.attention import LocalAttention
from engine.models.common.initialise import initialise
from engine.run import checkpoints
from engine.run.checkpoints import TrainState
from engine.run.compatibility import must_match
from engine.run.folder import RunFolder
from engine.run.saved import listed
from engine.trainer import export
from engine.trainer.export import export_weights
from engine.trainer.optimizer import build_optimizer
from engine.weights.copy import import_weights
from engine.weights.load import load_weights
from engine.zero.engine import ZeroEngine
from engine.zero.shards import sharded, stored
from engine.zero.states import master_weights, model_weights
from tests.data.tokenizers.chat_folder import CHATML, chat_folder
from tests.helpers import family
from tests.refusals import refused
from tests.run.damage import TOKEN
from tests.weights.folders import config, logits, our_logits
from tests.world import Named, run_world
from tests.zero.full import masters

pytestmark = pytest.mark.world
TOKENS = torch.randint(0, 258, (37,), generator=torch.Generator().manual_seed(1))
RUNS = [f"{dtype}{tied}" for dtype, tied in product(("fp32", "bf16"), ("", "-tied"))] + ["fp32-experts", "bf16-experts"]
QWEN3 = ("bf16-tied", "bf16-experts", "fp32-zero3")
PARTED = ["fp32-zero3", "bf16-zero3-tied", "fp32-zero3-experts"]
EXPERTS = ["model.experts=4", "model.top_k=2"]
YARN = ["model.rope.kind=yarn", "model.rope.factor=4", "model.rope.original_max_position_embeddings=16"]


def config_of(run: str) -> Config:
    plain = [f"dtype={run[:4]}", f"model.tied={run.endswith('tied')}".lower(), "model.rope_theta=5e5"]
    parted = ["zero.stage=3"] if "zero3" in run else []
    experts, qwen3 = run.endswith("experts"), run in QWEN3
    return config(*plain, *parted, *family(experts, qwen3), *(EXPERTS + YARN if experts else []))


def train_and_save(root: Path) -> None:
    """On a rank: one update of each kind of run, and its checkpoint."""
    for name in (*RUNS, *PARTED):
        made = config_of(name)
        with sharded(made):
            model = build_model(made)
        initialise(model, 0, stored=stored)
        engine = ZeroEngine(model, build_optimizer(model, made.optimizer), made)
        positions = torch.arange(37)
        engine.backward(engine.forward(TOKENS, positions, TOKENS, LocalAttention(positions)), 74)
        engine.step(1e-2)
        run = RunFolder(root / name)
        state = TrainState(1, {}, 2, {"data": "f"}, must_match(made))
        checkpoints.write(run.checkpoints, state, dist.get_rank(), engine.snapshot().write_each, TOKEN, Named(name))
        run.resolved.write_text(resolved_yaml(made))
        if made.zero.stage == 3:  # its files have no parameter whole
            torch.save(masters(engine), run.root / "whole.pt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two ranks with a checkpoint each."""
    root = tmp_path_factory.mktemp("runs")
    run_world(2, train_and_save, root)
    return root


def only(run: Path) -> Path:
    (folder,) = checkpoints.newest_first(run / "checkpoints")
    return folder


@pytest.mark.parametrize("run", RUNS)
def test_there_and_back_to_the_last_bit(runs: Path, run: str, tmp_path: Path) -> None:
    """A checkpoint's tensors, exported in several shards, imported, and loaded again."""
    written = export_weights(runs / run, tmp_path / "out", None, 30_000)
    assert written["shards"] > 1 and written["dtype"] == run[:4] and written["step"] == 1
    import_weights(tmp_path / "out", tmp_path / "in")
    held = model_weights(only(runs / run), parameters_of(config_of(run).model))
    model = build_model(config_of(run))
    model.to(torch.bfloat16 if run.startswith("bf16") else torch.float32)
    load_weights(model, model.shape, tmp_path / "in")
    assert set(model.state_dict()) == set(held)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, held[name]()), name
        assert tensor.dtype == held[name]().dtype


@pytest.mark.parametrize("run", RUNS)
def test_transformers_loads_it_unchanged_with_the_same_logits(runs: Path, run: str, tmp_path: Path) -> None:
    export_weights(runs / run, tmp_path / "out", None, 30_000)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    assert theirs.dtype == (torch.bfloat16 if run.startswith("bf16") else torch.float32)
    found, expected = our_logits(config_of(run), tmp_path / "out", TOKENS), logits(theirs.float(), TOKENS)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("run", ["bf16", "bf16-tied", "bf16-experts"])
def test_the_masters_of_a_bf16_run(runs: Path, run: str, tmp_path: Path) -> None:
    """Masters have more bits than the model's weights and round to them. Parameters lie across both ranks."""
    written = export_weights(runs / run, tmp_path / "out", "fp32", 1 << 30)
    assert written["dtype"] == "fp32"
    table = parameters_of(config_of(run).model)
    masters, weights = master_weights(only(runs / run), table), model_weights(only(runs / run), table)
    assert any(not torch.equal(masters[name](), weights[name]().float()) for name in masters)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.dtype == torch.float32
    assert torch.equal(theirs.model.embed_tokens.weight, masters["embedding.weight"]())
    for name in masters:
        assert torch.equal(masters[name]().bfloat16(), weights[name]())


@pytest.mark.parametrize("run", PARTED)
def test_shares_of_zero_3_are_joined(runs: Path, run: str, tmp_path: Path) -> None:
    """In fp32 and in the run's dtype."""
    expected = torch.load(runs / run / "whole.pt")
    for dtype in ("fp32", None):
        export_weights(runs / run, tmp_path / f"{dtype}", dtype, 30_000)
        model = build_model(config_of(run)).to(DTYPES[dtype or run[:4]])
        load_weights(model, model.shape, tmp_path / f"{dtype}")
        assert dict(model.named_parameters()).keys() == expected.keys()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name].to(parameter.dtype)), name


def test_bf16_of_an_fp32_run(runs: Path, tmp_path: Path) -> None:
    export_weights(only(runs / "fp32"), tmp_path / "out", "bf16", 1 << 30)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    held = model_weights(only(runs / "fp32"), parameters_of(config_of("fp32").model))
    assert torch.equal(theirs.lm_head.weight, held["head.weight"]().bfloat16())


def test_what_their_form_has_no_place_for_is_named(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a bias that routes tokens: the exported model differs without it."""
    assert export_weights(runs / "fp32-tied", tmp_path / "a", None, 1 << 30)["left_out"] == []
    held = {
        **model_weights(only(runs / "fp32"), parameters_of(config_of("fp32").model)),
        "layers.0.ffn.bias": lambda: torch.zeros(8),
    }
    monkeypatch.setattr(export, "model_weights", lambda *_: held)
    assert export_weights(runs / "fp32", tmp_path / "b", None, 1 << 30)["left_out"] == ["layers.0.ffn.bias"]


def test_a_run_lists_its_checkpoints(runs: Path) -> None:
    (one,) = listed(runs / "fp32")
    assert (one["step"], one["ranks"], one["path"]) == (1, 2, str(only(runs / "fp32")))
    assert one["bytes"] > 4 * 20_000
    with refused(CheckpointError, runs):
        listed(runs)


def flip(run: Path) -> None:
    (path,) = (only(run) / "zero").iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def unresolve(run: Path) -> None:
    (run / "resolved.yaml").unlink()


def change(run: Path) -> None:
    path = run / "resolved.yaml"
    path.write_text(path.read_text().replace("ffn: 48", "ffn: 64"))


def empty(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


@pytest.mark.parametrize(
    ("harm", "key", "named"),
    [
        (flip, "checkpoints", "step-00000001"),
        (unresolve, "checkpoints/step-00000001", "resolved.yaml"),
        (change, "checkpoints/step-00000001", "model.ffn: 48 -> 64"),
        (empty, "", ""),
    ],
)
def test_what_cannot_be_exported_is_refused(
    runs: Path, tmp_path: Path, harm: Callable[[Path], None], key: str, named: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs / "fp32", run)
    harm(run)
    with refused(CheckpointError, run / key) as problems:
        export_weights(run, tmp_path / "out", None, 1 << 30)
    assert named in problems[0].message
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_whose_newest_checkpoint_is_damaged_gives_the_one_before(runs: Path, tmp_path: Path) -> None:
    """As `train` does; a checkpoint named by its path is exported or refused."""
    run, said = tmp_path / "run", list[str]()
    shutil.copytree(runs / "fp32", run)
    old = only(run)
    newer = shutil.copytree(old, old.with_name("step-00000002"))
    (newer / "manifest.json").unlink()
    written = export_weights(run, tmp_path / "out", None, 1 << 30, said.append)
    assert (written["checkpoint"], written["step"]) == (str(old), 1)
    assert said == [
        f"warning: {newer.name} is damaged (manifest.json is missing); using {old.name} instead",
        "no tokenizer in the folder: data.tokenizer=bytes has no files, and transformers has no equivalent",
    ]
    assert written["tokenizer"] == []


@pytest.mark.parametrize("kind", ["huggingface", "unknown"])
def test_tokens_that_another_tokenizer_made_are_not_called_bytes(runs: Path, tmp_path: Path, kind: str) -> None:
    """`data.tokenizer` is bytes for a run on token files that names none."""
    run, said = tmp_path / "run", list[str]()
    shutil.copytree(runs / "fp32", run)
    facts = RunFolder(run).summary
    known = json.loads(facts.read_text()) if facts.exists() else {}
    facts.write_text(json.dumps(known | {"tokenizers": ["bytes", kind]}))
    assert export_weights(run, tmp_path / "out", None, 1 << 30, said.append)["tokenizer"] == []
    (line,) = said
    assert line.startswith("warning: no tokenizer in the folder") and f"another tokenizer ({kind}) made" in line


def test_a_file_that_is_no_tokenizer_is_not_copied(runs: Path, tmp_path: Path) -> None:
    """The config of somebody else's run could name a private file, which the exported folder would then publish."""
    private, run, said = tmp_path / "id_rsa", tmp_path / "run", list[str]()
    private.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nsecret")
    shutil.copytree(runs / "fp32", run)
    resolved = RunFolder(run).resolved
    resolved.write_text(resolved.read_text().replace("tokenizer: bytes", f"tokenizer: {private}"))
    assert export_weights(run, tmp_path / "out", None, 1 << 30, said.append)["tokenizer"] == []
    (line,) = said
    assert line.startswith(f"warning: no tokenizer in the folder: {private}: is not a known tokenizer")
    assert not [file for file in (tmp_path / "out").iterdir() if b"secret" in file.read_bytes()]


@pytest.mark.parametrize(
    ("facts", "stops"),
    [
        ({"bos": 256, "eos": 257, "end_of_turn": None, "generation": {}}, 257),
        ({"bos": 256, "eos": 257, "end_of_turn": 4, "generation": {"eos_token_id": [2, 4]}}, [2, 4, 257]),
        ({"bos": 256, "eos": 257}, [257, 3]),  # of a run before summary.json had the end of a turn
    ],
)
def test_transformers_stops_at_the_tokens_of_the_run(
    facts: dict[str, Any], stops: object, runs: Path, tmp_path: Path
) -> None:
    run, tokenizer = tmp_path / "run", chat_folder(tmp_path / "tokenizer", CHATML)
    shutil.copytree(runs / "fp32", run)
    folder = RunFolder(run)
    folder.summary.write_text(json.dumps(facts))
    folder.resolved.write_text(folder.resolved.read_text().replace("tokenizer: bytes", f"tokenizer: {tokenizer}"))
    export_weights(run, tmp_path / "out", None, 1 << 30, lambda line: None)
    found = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (found.bos_token_id, found.eos_token_id) == (256, stops)
    assert AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == stops


def test_an_existing_target_is_refused_before_any_work(tmp_path: Path) -> None:
    """Hashing a checkpoint takes minutes, so an existing target must be refused first."""
    (tmp_path / "notes").write_text("mine")
    with refused(ConfigError, "--out"):
        export_weights(tmp_path / "no run", tmp_path, None, 1 << 30)
    assert (tmp_path / "notes").read_text() == "mine"
