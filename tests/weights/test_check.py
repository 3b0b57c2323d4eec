"""Weights that do not fit a model are refused, with each mismatch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import DataError
from engine.weights.check import check_weights
from tests.weights.folders import config, llama, saved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(llama(), tmp_path)


def problems(folder: Path, *overrides: str) -> list[str]:
    with pytest.raises(DataError) as caught:
        check_weights(folder, config(*overrides))
    assert caught.value.code == 4
    return [f"{problem.key}: {problem.message}" for problem in caught.value.problems]


def change(folder: Path, **tensors: Any) -> None:
    """Replace tensors of a folder, found by the ends of their names; None removes one."""
    state = load_file(folder / "model.safetensors")
    for end, tensor in tensors.items():
        name = next((name for name in state if name.endswith(end)), end)
        state[name] = tensor
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def test_a_missing_folder_is_named_by_its_key(tmp_path: Path) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    assert problems(missing) == [f"run.weights={missing}: no such folder"]
    assert problems(empty) == [f"run.weights={empty}: has no config.json"]


def test_weights_that_fit(folder: Path) -> None:
    assert check_weights(folder, config()) == []
    assert check_weights(folder, config("model.name=other", "dtype=bf16")) == []


def test_heads_do_not_show_in_a_shape(folder: Path) -> None:
    """Two heads of 16 have the same tensor shapes as four heads of 8, and are another model."""
    assert problems(folder, "model.heads=2", "model.kv_heads=1") == [
        "model.heads: is 2, but the weights have 4",
        "model.kv_heads: is 1, but the weights have 2",
    ]


def test_another_vocabulary(folder: Path) -> None:
    first, *tensors = problems(folder, "model.vocab=300")
    assert first == "model.vocab: is 300, but the weights have 258"
    assert tensors == [
        f"{folder}: model.embed_tokens.weight has shape [258, 32], but the model needs [300, 32]",
        f"{folder}: lm_head.weight has shape [258, 32], but the model needs [300, 32]",
    ]


def test_up_to_ten_mismatches_are_listed(folder: Path) -> None:
    """Two more layers need 18 more tensors."""
    found = problems(folder, "model.layers=4")
    assert found[0] == "model.layers: is 4, but the weights have 2"
    assert "model.layers.2.input_layernorm.weight is missing: the model needs shape [32]" in found[1]
    assert len(found) == 11
    assert found[-1] == f"{folder}: and 9 more tensors that do not fit"


def test_missing_and_unknown_tensors_and_unsupported_dtypes(folder: Path) -> None:
    change(folder, **{"layers.0.mlp.up_proj.weight": None, "0.mlp.up_proj.bias": torch.zeros(48)})
    change(folder, **{"model.norm.weight": torch.zeros(32, dtype=torch.int8)})
    assert problems(folder) == [
        f"{folder}: model.layers.0.mlp.up_proj.weight is missing: the model needs shape [48, 32]",
        f"{folder}: model.norm.weight is stored as I8, which is not one of F64, F32, BF16, F16",
        f"{folder}: 0.mlp.up_proj.bias does not belong to the model",
    ]


def test_tied_and_untied_are_different_models(folder: Path, tmp_path: Path) -> None:
    assert problems(folder, "model.tied=true") == ["model.tied: is true, but the weights have false"]
    tied = saved(llama(tie_word_embeddings=True), tmp_path / "tied")
    assert check_weights(tied, config("model.tied=true")) == []
    assert len(problems(tied)) == 2


def test_a_head_in_the_files_of_a_tied_model_must_equal_the_embedding(tmp_path: Path) -> None:
    """Otherwise another model would be trained without notice."""
    folder = saved(llama(tie_word_embeddings=True), tmp_path / "tied")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, **{"lm_head.weight": embedding.clone()})
    assert check_weights(folder, config("model.tied=true")) == []
    change(folder, **{"lm_head.weight": embedding + 1})
    (one,) = problems(folder, "model.tied=true")
    assert "lm_head.weight differs from the embedding" in one
    change(folder, **{"lm_head.weight": embedding.to(torch.float8_e4m3fn)})
    (one,) = problems(folder, "model.tied=true")
    assert one.endswith("lm_head.weight is stored as F8_E4M3, unlike the embedding that it is tied to")
    embedding[0, 0] = float("nan")
    change(folder, **{"lm_head.weight": embedding.clone(), "embed_tokens.weight": embedding})
    assert check_weights(folder, config("model.tied=true")) == []


def test_more_layers_than_tensors_are_refused_at_once(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2**20}))
    said = problems(folder, "model.layers=1048576")[-1]
    assert said == f"{folder}: has fewer tensors than the model has layers (model.layers=1048576)"


def test_tensors_that_are_computed_here_may_be_in_the_files(folder: Path) -> None:
    change(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    assert check_weights(folder, config()) == []


def test_other_rotary_angles_are_reported_and_accepted(folder: Path) -> None:
    """Training for longer contexts changes them on purpose."""
    reported = check_weights(folder, config("model.rope_theta=5e5"))
    assert reported == ["the weights were made with model.rope_theta=10000.0; this run has 500000.0"]
    reported = check_weights(folder, config("model.rope.kind=linear", "model.rope.factor=2", "model.rope_theta=1e4"))
    assert "the weights were made with model.rope.kind=none; this run has linear" in reported


def test_a_config_that_belongs_to_other_weights(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 64}))
    with pytest.raises(DataError) as caught:
        check_weights(folder, config("model.ffn=64"))
    assert len(caught.value.problems) == 6
    assert "config.json and the files are not from the same model" in str(caught.value.problems[0].hint)
