"""config.json as transformers writes it is understood; what our models do not support is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, LlamaConfig, MixtralConfig

from engine.errors import DataError
from engine.weights.config_json import config_json, model_values, read_config, with_their_keys
from tests.refusals import refused
from tests.weights.folders import TINY, config, qwen3, qwen3_moe, saved

HERE = Path("config.json")
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], **TINY}
VALUES = {
    "name": "llama",
    "family": "llama",
    "head_size": None,
    "experts": 1,
    "top_k": 1,
    "norm_top_k": True,
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
    "vocab": 258,
    "norm_eps": 1e-5,
    "tied": False,
    "rope_theta": 10000.0,
}


def test_a_llama() -> None:
    assert model_values(LLAMA, HERE) == VALUES


@pytest.mark.parametrize("tied", [True, False])
def test_what_transformers_writes(tmp_path: Path, tied: bool) -> None:
    rope = {"rope_type": "default", "rope_theta": 5e5}
    LlamaConfig(**TINY, tie_word_embeddings=tied, rope_parameters=rope).save_pretrained(tmp_path)
    assert model_values(read_config(tmp_path), HERE) == VALUES | {"tied": tied, "rope_theta": 5e5}


def test_a_mixtral_that_transformers_writes(tmp_path: Path) -> None:
    MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=3).save_pretrained(tmp_path)
    found = model_values(read_config(tmp_path), HERE)
    assert (found["name"], found["experts"], found["top_k"]) == ("mixtral", 4, 3)
    plain = {key: value for key, value in TINY.items() if key != "rope_theta"}
    old = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 3, **plain}
    assert model_values(old, HERE)["rope_theta"] == 1e6, "Mixtral's default base"


def test_qwen3_models_that_transformers_writes(tmp_path: Path) -> None:
    """In the published files the number of experts has its first name, and sliding_window a number without effect."""
    for model, family in ((qwen3(), "qwen3"), (qwen3_moe(norm_topk_prob=False), "qwen3_moe")):
        saved(model, tmp_path / family)
        found = read_config(tmp_path / family)
        values = model_values(found | {"sliding_window": 4096, "use_sliding_window": False}, HERE)
        assert (values["family"], values["head_size"], values["norm_top_k"]) == (family, 12, family == "qwen3")
        assert (values["ffn"], values["experts"]) == ((48, 1) if family == "qwen3" else (24, 4))
        if family == "qwen3_moe":
            published = {key: value for key, value in found.items() if key != "num_local_experts"}
            assert model_values(published | {"num_experts": 4}, HERE) == model_values(found, HERE)
            for change in ({"num_experts": 8}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}):
                with pytest.raises(DataError, match=next(iter(change))):
                    model_values(found | change, HERE)
        with refused(DataError, "config.json") as problems:
            model_values(found | {"use_sliding_window": True}, HERE)
        assert "use_sliding_window" in problems[0].message


def test_keys_that_old_files_omit() -> None:
    """LLaMA 1 has neither num_key_value_heads nor rope_theta."""
    old = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert model_values(old, HERE) == VALUES | {"kv_heads": 4}


SCALINGS = {
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0},
    "linear": {"factor": 2.0},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_rotary_scalings_in_either_spelling(kind: str) -> None:
    scaling = SCALINGS[kind]
    expected = VALUES | {"rope_theta": 5e5, "rope.kind": kind} | {f"rope.{k}": v for k, v in scaling.items()}
    new = LLAMA | {"rope_parameters": {"rope_type": kind, "rope_theta": 500000, **scaling}}
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": kind, **scaling}}
    assert model_values(new, HERE) == model_values(old, HERE) == expected


YARN = {"rope_type": "yarn", **SCALINGS["yarn"]}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_scaling": YARN | {"rope_theta": 5e5}},
        {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_scaling": YARN, "rope_theta": 5e5},
        {"rope_parameters": YARN | {"rope_theta": 1e4}, "rope_scaling": YARN},  # the default
        {"rope_parameters": YARN, "rope_scaling": {"type": "yarn", **SCALINGS["yarn"]}, "rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", **SCALINGS["yarn"]}},
    ],
)
def test_what_is_said_twice_the_same_is_what_transformers_reads(rope: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | LLAMA | rope))
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    ours = model_values(LLAMA | rope, HERE)
    assert (ours["rope_theta"], ours.get("rope.kind", "default")) == (theirs["rope_theta"], theirs["rope_type"])


@pytest.mark.parametrize(
    ("rope", "values"),
    [
        (
            {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_scaling": YARN | {"rope_theta": 1e4}},
            "rope_parameters rope_scaling rope_theta 500000.0 10000.0",
        ),
        (
            {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_scaling": YARN},
            "rope_parameters rope_scaling rope_theta 500000.0 10000.0",
        ),
        (
            {"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 8.0}},
            "rope_parameters rope_scaling factor 4.0 8.0",
        ),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN},
            "rope_parameters rope_scaling beta_fast null 32.0",
        ),
        (
            {"rope_parameters": YARN | {"rope_theta": 5e5}, "rope_theta": 1e4},
            "rope_parameters rope_theta 500000.0 10000.0",
        ),
    ],
)
def test_what_is_said_twice_and_differs_is_refused(rope: dict[str, Any], values: str) -> None:
    """transformers would take one of them, and other programs the other."""
    with refused(DataError, HERE) as problems:
        model_values(LLAMA | rope, HERE)
    assert [value for value in values.split() if value not in problems[0].message] == []


def test_a_model_type_of_another_architecture_is_refused() -> None:
    """transformers chooses by model_type."""
    with refused(DataError, "config.json") as problems:
        model_values(LLAMA | {"model_type": "mistral"}, HERE)
    assert "mistral" in problems[0].message


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen2ForCausalLM"]},
        {"architectures": None},
        {"model_type": "qwen2", "architectures": None},
        {"architectures": "LlamaForCausalLM"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"sliding_window": 4096},
        {"hidden_act": "gelu"},
        {"head_dim": 0},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"quantization_config": {"bits": 4}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}},
        {"rope_scaling": "yarn"},
        {"vocab_size": None},
    ],
    ids=str,
)
def test_unsupported_models_are_refused(changes: dict[str, Any]) -> None:
    """The message has the key, in a rotary scaling that which cannot be followed."""
    with refused(DataError, HERE) as problems:
        model_values(LLAMA | changes, HERE)
    key, value = next(iter(changes.items()))
    if key == "rope_scaling":
        key = "rotary" if isinstance(value, str) else "truncate" if "truncate" in value else "rope_type"
    assert key in problems[0].message


@pytest.mark.parametrize("value", ["32", "wide", -32, 0, 32.0, True, [32], {"a": 1}, math.nan, "${run.seed}", "???"])
def test_a_size_is_a_whole_number(value: object) -> None:
    """No other problem is derived from an invalid size, such as a wrong head size."""
    with refused(DataError, HERE) as problems:
        model_values(LLAMA | {"hidden_size": value, "head_dim": 8}, HERE)
    assert problems[0].message.startswith("hidden_size ") and problems[0].message.endswith(f" {json.dumps(value)}")


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps", '"1e-5"']),
        ({"rms_norm_eps": math.nan}, ["rms_norm_eps", "NaN"]),
        ({"tie_word_embeddings": "false"}, ["tie_word_embeddings", '"false"']),
        ({"rope_theta": "5e5"}, ["rope_theta", '"5e5"']),
        ({"rope_theta": 0}, ["rope_theta", "0"]),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, ["factor", "-2"]),
    ],
)
def test_other_values_have_the_right_type_and_range(changes: dict[str, Any], values: list[str]) -> None:
    with refused(DataError, HERE) as problems:
        model_values(LLAMA | changes, HERE)
    assert [value for value in values if value not in problems[0].message] == []


def test_our_keys_are_replaced_by_theirs() -> None:
    text = "model.kv_heads: 3 does not divide model.heads=4; model.rope.kind and model.rope.factor stay what they are"
    found = with_their_keys(text)
    assert found.startswith("num_key_value_heads: 3 does not divide num_attention_heads=4; rope_type and factor stay")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(DataError) as caught:
        model_values(LLAMA | {"attention_bias": True, "vocab_size": None, "rope_scaling": {"type": "su"}}, HERE)
    assert len(caught.value.problems) == 3


def test_a_folder_without_config(tmp_path: Path) -> None:
    with refused(DataError, f"{tmp_path}/nowhere"):
        read_config(tmp_path / "nowhere")
    with refused(DataError, tmp_path) as problems:
        read_config(tmp_path)
    assert "config.json" in problems[0].message
    for text in ("{", "[1]"):
        (tmp_path / "config.json").write_text(text)
        with refused(DataError):
            read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with refused(DataError, f"{tmp_path}/config.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["model.family=mixtral", "model.experts=4", "model.top_k=2"],
        ["model.family=qwen3", "model.head_size=12"],
        ["model.family=qwen3_moe", "model.experts=4", "model.top_k=2", "model.norm_top_k=false"],
    ],
)
def test_ours_reads_back_as_theirs_and_as_ours(tmp_path: Path, more: list[str]) -> None:
    shape = config("model.tied=true", "model.rope_theta=5e5", *more).model
    written = config_json(shape, 4096, "bfloat16", 256, 257)
    (tmp_path / "config.json").write_text(json.dumps(written))
    values = shape.model_dump(exclude={"name", "rope", "window", "windowed"})  # config.json must have no window
    assert {key: value for key, value in model_values(written, HERE).items() if key != "name"} == values
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.max_position_embeddings == 4096
    assert str(theirs.dtype) == "torch.bfloat16"
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert theirs.tie_word_embeddings is True
