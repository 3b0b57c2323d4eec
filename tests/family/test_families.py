"""The table of parameters is that of our models, and tensor names are those that Hugging Face's models write."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from engine.config.schema import Model
from engine.family.families import FAMILIES, family_of, parameters_of, stored_names
from engine.models.build import build_model
from engine.models.common.norm import norm_weights
from engine.weights.check import places
from engine.weights.folder import read_headers
from engine.weights.load import load_weights
from tests.weights.folders import config, llama, mixtral, qwen3, qwen3_moe, saved

QWEN3 = ["model.family=qwen3", "model.head_size=12"]
QWEN3_MOE = ["model.family=qwen3_moe", "model.head_size=12", "model.ffn=24", "model.experts=4", "model.top_k=2"]
MOE = ["model.family=mixtral", "model.experts=8", "model.top_k=2"]


def test_the_schema_names_the_families() -> None:
    assert list(FAMILIES) == list(get_args(Model.model_fields["family"].annotation))


@pytest.mark.parametrize("more", [[], MOE, QWEN3, QWEN3_MOE], ids=FAMILIES)
def test_parameters_are_those_of_the_model(more: list[str]) -> None:
    settings = config("model.kv_heads=1", "model.vocab=259", *more)
    model = build_model(settings)
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == {
        name: one.shape for name, one in parameters_of(settings.model).items()
    }
    norms = norm_weights(model)
    assert all(
        (one in norms) != parameters_of(settings.model)[name].is_matrix for name, one in model.named_parameters()
    )


def theirs_of(*overrides: str) -> set[str]:
    return {name for names in stored_names(config(*overrides).model).values() for name in names}


def test_a_llamas_names(tmp_path: Path) -> None:
    assert family_of(config().model).architecture == "LlamaForCausalLM"
    assert theirs_of() == set(read_headers(saved(llama(), tmp_path / "a")))
    assert theirs_of("model.tied=true") == set(read_headers(saved(llama(tie_word_embeddings=True), tmp_path / "b")))


def test_a_mixtrals_names(tmp_path: Path) -> None:
    assert family_of(config(*MOE).model).architecture == "MixtralForCausalLM"
    assert theirs_of(*MOE) == set(read_headers(saved(mixtral(), tmp_path)))


def test_a_qwen3s_names(tmp_path: Path) -> None:
    assert theirs_of(*QWEN3) == set(read_headers(saved(qwen3(), tmp_path / "a")))
    assert theirs_of(*QWEN3_MOE) == set(read_headers(saved(qwen3_moe(), tmp_path / "b")))


class Stacked(nn.Module):
    """Parameters with the names of our Mixtral, experts stacked."""

    def __init__(self, sizes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.held = nn.ParameterDict({name.replace(".", "/"): torch.zeros(size) for name, size in sizes.items()})

    def named_parameters(self, *_: object, **__: object) -> list[tuple[str, nn.Parameter]]:  # type: ignore[override]
        return [(name.replace("/", "."), parameter) for name, parameter in self.held.items()]


def test_experts_are_stacked_from_their_tensors(tmp_path: Path) -> None:
    """Expert e of a projection must be entry e of ours, or the router would send tokens to the wrong experts."""
    theirs, shape = mixtral(), config(*MOE).model
    headers = read_headers(saved(theirs, tmp_path, "20KB"))
    sizes = {
        ours: (() if len(names) == 1 else (len(names),)) + headers[names[0]].shape
        for ours, names in stored_names(shape).items()
    }
    model = Stacked(sizes)
    assert len(places(model, shape)) == len(headers)
    load_weights(model, shape, tmp_path)
    ours, state = dict(model.named_parameters()), theirs.state_dict()
    for layer in range(2):
        gate_up = state[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        stacked = [ours[f"layers.{layer}.ffn.{name}"] for name in ("gate", "up")]
        assert torch.equal(torch.cat(stacked, dim=1), gate_up)
        assert torch.equal(ours[f"layers.{layer}.ffn.down"], state[f"model.layers.{layer}.mlp.experts.down_proj"])
        assert torch.equal(ours[f"layers.{layer}.ffn.router.weight"], state[f"model.layers.{layer}.mlp.gate.weight"])
