"""With `run.weights` the model of a config is that of the weights, in every command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.config.load import load, resolved_yaml
from engine.config.schema import Config
from engine.errors import ConfigError, DataError
from engine.run.folder import RunFolder
from engine.weights.model import model_of, read_model
from tests.presets import LLAMA7B_256K, fixed
from tests.refusals import refused

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_theta": 5e5,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


def loaded(*overrides: str) -> tuple[Config, list[str]]:
    said = list[str]()
    return load(overrides, model_of=model_of, say_model=said.append), said


def test_shape_and_rotary_embedding_are_those_of_the_weights(weights: Path) -> None:
    for recipe in ("quickstart", "llama7b-256k", "mixtral8x7b-256k"):
        config, (line,) = loaded(*fixed(recipe), f"run.weights={weights}")
        assert config.model == read_model(weights).config.model.model_copy(update={"name": "llama"})
        assert f"recipe={recipe}" in line and "model.layers=3" in line and "model.rope.kind" in line
    plain, said = loaded("recipe=llama7b-256k")
    assert plain == load(["recipe=llama7b-256k"]) and said == []


def test_overrides_of_an_import_say_the_same(weights: Path) -> None:
    overrides = read_model(weights).overrides
    config, said = loaded(*LLAMA7B_256K, *overrides, f"run.weights={weights}")
    assert config.model == read_model(weights).config.model and said == []


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["model.layers=4"], ["model.layers=4", "3"]),
        (["model.layers=4", "model.heads=6", "model.tied=false"], ["layers=4", "model.heads=6", "model.tied=false"]),
        (["model.hidden=64", "model.rope_theta=1e6"], ["model.hidden=64", "model.rope_theta=1e6"]),
        (["model.family=qwen3"], ["model.family=qwen3", "llama"]),
        (["model=llama7b"], ["model.layers=32 of model=llama7b", "model.vocab=32000 of model=llama7b"]),
    ],
)  # fmt: skip
def test_what_contradicts_the_weights_is_one_error(overrides: list[str], names: list[str], weights: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded("recipe=quickstart", f"run.weights={weights}", *overrides)
    (problem,) = caught.value.problems
    assert problem.key == f"run.weights={weights}" and problem.hint and caught.value.code == 2
    assert all(name in problem.message for name in names)


def test_a_file_of_ones_own_is_named_by_its_lines(weights: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"defaults: quickstart\nrun:\n  weights: {weights}\nmodel:\n  layers: 2\n  vocab: 300\n")
    with pytest.raises(ConfigError) as caught:
        loaded(f"recipe={mine}")
    (problem,) = caught.value.problems
    assert f"model.layers=2 of {mine}:5" in problem.message and "vocab" not in problem.message
    mine.write_text(f"defaults: quickstart\nrun:\n  weights: {weights}\nmodel:\n  layers: 3\n")
    assert loaded(f"recipe={mine}")[0].model.vocab == 300


def test_a_copy_of_a_recipe_has_the_rotary_embedding_of_the_weights(weights: Path, tmp_path: Path) -> None:
    """Its option of the model is one line of `defaults`."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults:\n  - quickstart\n  - override /model: llama7b\n")
    with pytest.raises(ConfigError) as caught:
        loaded(f"recipe={mine}", f"run.weights={weights}")
    (problem,) = caught.value.problems
    assert f"model.layers=32 of {mine}:3" in problem.message and "rope" not in problem.message


def test_a_wrong_value_is_reported_as_one(weights: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(f"run.weights={weights}", "model.vocab=300K")
    assert [one.key for one in caught.value.problems] == ["model.vocab"]


def test_the_rotary_embedding_may_be_set_for_a_longer_context(weights: Path) -> None:
    config, _ = loaded(f"run.weights={weights}", "model.rope_theta=1e6")
    assert (config.model.rope_theta, config.model.rope.kind) == (1e6, "linear")
    yarn = ["model.rope.kind=yarn", "model.rope.factor=8", "model.rope.original_max_position_embeddings=8K"]
    config, _ = loaded(f"run.weights={weights}", *yarn)
    assert (config.model.rope_theta, config.model.rope.kind, config.model.layers) == (5e5, "yarn", 3)


def test_a_recipe_for_weights_keeps_its_rotary_embedding(weights: Path) -> None:
    """It is made for its context, and planned where the weights are not."""
    plain = load(["recipe=llama3-8b-128k-2nodes"]).model
    config, _ = loaded("recipe=llama3-8b-128k-2nodes", f"run.weights={weights}")
    assert (config.model.layers, config.model.rope, config.model.rope_theta) == (3, plain.rope, plain.rope_theta)
    assert loaded("recipe=llama3-8b-128k-2nodes")[0].model == plain
    config, (line,) = loaded("recipe=llama3-8b-128k-2nodes", "run.weights=meta-llama/Llama-3.1-8B")
    assert config.model == plain and "meta-llama/Llama-3.1-8B" in line


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "https://huggingface.co/meta-llama/Llama-3.1-8B"])
def test_a_name_on_the_hub_gets_the_command_that_downloads_it(name: str) -> None:
    with pytest.raises(DataError) as caught:
        loaded(f"run.weights={name}")
    (problem,) = caught.value.problems
    assert problem.key == f"run.weights={name}"
    assert "hf download meta-llama/Llama-3.1-8B --local-dir" in str(problem.hint)


def test_a_missing_or_invalid_folder_is_refused(tmp_path: Path, weights: Path) -> None:
    for change, message in (({"num_attention_heads": 5}, "num_attention_heads"), ({"model_type": "qwen2"}, "qwen2")):
        (weights / "config.json").write_text(json.dumps(SHAPE | change))
        with pytest.raises(DataError, match=message):
            loaded(f"run.weights={weights}")
    with pytest.raises(DataError) as caught:
        loaded(f"run.weights={tmp_path}/none")
    assert "hf download OWNER/NAME " in str(caught.value.problems[0].hint), "a path is no name on the Hub"
    elsewhere = load([f"run.weights={tmp_path}/none"], model_of=model_of, elsewhere=True)
    assert elsewhere.model == load([]).model, "as where a run is submitted to other machines"
    with refused(ConfigError, "model.layer"):  # what is typed wrongly comes first
        loaded(f"run.weights={tmp_path}/none", "model.layer=3")


def test_the_tokenizer_of_documents_is_that_of_the_weights(weights: Path, tmp_path: Path) -> None:
    """Unless the user or a recipe for weights sets one, or the tokens have been made."""
    typed = ["recipe=llama7b-256k", f"run.weights={weights}", "data.path=a", "parallel.tp=1"]
    theirs = str(weights)
    assert loaded(*typed)[0].data.tokenizer == "bytes", "the folder has none"
    (weights / "tokenizer.json").write_text("{}")
    mine, sources = tmp_path / "mine.yaml", "data.sources.a.path=a"
    sizes = "defaults: llama7b-256k\nparallel:\n  tp: 1\n"
    mine.write_text(f"{sizes}run:\n  weights: {weights}\ndata:\n  tokenizer: bytes\n")
    of_texts = [
        [*typed, "data=jsonl"],
        ["recipe=1b-64k-1node", *typed[1:]],  # its own is an example
        [
            "data=tokens",
            typed[1],
            sources,
            "data.sources.b.path=b",
            "data.sources.b.format=jsonl",
            "data.mix={a: 1, b: 1}",
        ],
    ]
    for words in of_texts:
        config, (line,) = loaded(*words)
        assert config.data.tokenizer == theirs and f'data.tokenizer="{theirs}"' in line
    for words in (
        [*typed, "data.tokenizer=bytes"],
        [f"recipe={mine}"],
        [*typed, "data=tokens"],
        ["data=jsonl", typed[1], sources, "data.sources.a.format=tokens", "data.mix={a: 1}"],
    ):
        assert loaded(*words)[0].data.tokenizer == "bytes"
    assert loaded("recipe=llama3-8b-128k-2nodes", typed[1])[0].data.tokenizer == theirs


def test_a_run_with_checkpoints_keeps_its_model(weights: Path, tmp_path: Path) -> None:
    """Its rotary embedding may be that of the recipe, and the weights may be gone."""
    typed = [f"run.out={tmp_path / 'run'}", f"run.weights={weights}"]
    before: Any = loaded(*typed, "model.rope_theta=1e6", "data.tokenizer=mine.json")[0]
    (weights / "tokenizer.json").write_text("{}")
    folder = RunFolder(tmp_path / "run")
    (folder.checkpoints / "step-00000001").mkdir(parents=True)
    folder.resolved.write_text(resolved_yaml(before))
    assert loaded(*typed)[0].model.rope_theta == 1e6
    shutil.rmtree(weights)
    resumed = loaded(*typed)[0]
    assert (resumed.model, resumed.data.tokenizer) == (before.model, "mine.json")
