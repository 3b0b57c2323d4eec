"""Hugging Face's models as references for our models, optionally without their casts to float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    modeling_rope_utils,
)
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from engine.attention.context import AttentionContext
from engine.attention.kernels.choice import choose
from engine.close import error
from engine.config.schema import Model
from engine.family.families import family_of, stored_names
from engine.models.common.loss import token_loss
from engine.models.decoder import Decoder
from engine.weights.check import places
from tests.attention.rings import unsplit

CPU = torch.device("cpu")
TOKENS = 67
THEIRS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


def theirs_of(shape: Model) -> PreTrainedConfig:
    """Return their config of a shape."""
    scaling = {name: value for name, value in shape.rope.model_dump(exclude={"kind"}).items() if value is not None}
    kind = shape.rope.kind if shape.rope.kind != "none" else "default"
    original = shape.rope.original_max_position_embeddings or 512
    values: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": int(original * (shape.rope.factor or 1)),
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": kind, "rope_theta": shape.rope_theta} | scaling,
        "tie_word_embeddings": shape.tied,
        "attn_implementation": "eager",
        "initializer_range": 0.2,
    }
    if family_of(shape).qk_norm:
        values["head_dim"] = shape.head_dim
    if family_of(shape).experts:
        values |= {"num_experts_per_tok": shape.top_k, "experts_implementation": "eager"}
        values[family_of(shape).keys["experts"]] = shape.experts
    if shape.family == "qwen3_moe":
        values |= {"moe_intermediate_size": shape.ffn, "intermediate_size": 7, "norm_topk_prob": shape.norm_top_k}
    config, _ = THEIRS[shape.family]
    return config(**values)


def huggingface(shape: Model, dtype: torch.dtype) -> PreTrainedModel:
    """Return their model of a shape, with weights large enough that every part of it shows."""
    torch.manual_seed(1)
    model = THEIRS[shape.family][1](theirs_of(shape)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@contextmanager
def without_float32_casts() -> Iterator[None]:
    """Patch out the casts to float32 inside Hugging Face's code: what it calls float or float32 is float64."""
    wide = SimpleNamespace(**vars(torch) | {"float": torch.float64, "float32": torch.float64})
    with pytest.MonkeyPatch.context() as patch:
        for module in (modeling_llama, modeling_mixtral, modeling_qwen3, modeling_qwen3_moe, modeling_rope_utils):
            patch.setattr(module, "torch", wide)
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def stored(state: Mapping[str, Tensor], shape: Model) -> dict[str, Tensor]:
    """Return tensors under the names that they have in memory as they are stored: experts one by one."""
    if not family_of(shape).experts:
        return dict(state)
    split, is_mixtral = {}, shape.family == "mixtral"
    gate, down, up = ("w1", "w2", "w3") if is_mixtral else ("gate_proj", "down_proj", "up_proj")
    for name, tensor in state.items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name
        if name.endswith(".gate_up_proj"):
            stacks = dict(zip((gate, up), tensor.chunk(2, dim=1), strict=True))
        elif name.endswith(".down_proj"):
            stacks = {down: tensor}
        else:
            split[name] = tensor
            continue
        for part, stack in stacks.items():
            for expert in range(shape.experts):
                split[f"{name.rpartition('.')[0]}.{expert}.{part}.weight"] = stack[expert]
    return split


def under_our_names(stored: Mapping[str, Tensor], shape: Model) -> dict[str, Tensor]:
    """Return stored tensors under our names, experts stacked; a tied head is left out."""
    return {
        ours: stored[theirs[0]] if len(theirs) == 1 else torch.stack([stored[name] for name in theirs])
        for ours, theirs in stored_names(shape).items()
    }


@torch.no_grad()
def ours_of(theirs: PreTrainedModel, shape: Model, dtype: torch.dtype) -> Decoder:
    """Return our model with the weights of theirs."""
    model = Decoder(shape).to(dtype)
    state = stored(theirs.state_dict(), shape)
    for name, place in places(model, shape).items():
        place.tensor.copy_(state[name])
    return model


def run(model: Decoder, tokens: Tensor, kernel: str | None = None) -> Tensor:
    """Return the logits of one unsplit sequence."""
    chosen = choose(CPU, model.embedding.weight.dtype, model.shape.head_dim, kernel)
    attention = AttentionContext(unsplit(len(tokens)), None, chosen)
    return model(tokens, torch.arange(len(tokens)), attention=attention)  # type: ignore[no-any-return]


def compare(shape: Model, dtype: torch.dtype) -> dict[str, float]:
    """Return the errors of logits, loss and every gradient, by name."""
    theirs = huggingface(shape, dtype)
    ours = ours_of(theirs, shape, dtype)
    tokens = torch.randint(0, shape.vocab, (TOKENS,), generator=torch.Generator().manual_seed(2))
    expected = theirs(tokens[None], labels=tokens[None])
    expected.loss.backward()
    logits = run(ours, tokens)
    loss = token_loss(logits[:-1], tokens[1:]) / (TOKENS - 1)
    loss.backward()
    assert expected.logits.dtype == logits.dtype == expected.loss.dtype == loss.dtype == dtype
    gradients = under_our_names(stored({name: p.grad for name, p in theirs.named_parameters()}, shape), shape)
    found = {name: error(p.grad, gradients[name]) for name, p in ours.named_parameters()}
    assert found.keys() == gradients.keys()
    return {"logits": error(logits, expected.logits[0]), "loss": error(loss, expected.loss), **found}
