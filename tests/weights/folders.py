"""Tiny random models made by transformers, and the folders that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from engine.config.load import load
from engine.config.schema import Config
from engine.models.build import build_model
from engine.weights.load import load_weights

TINY = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
SHAPE = ["model.hidden=32", "model.ffn=48", "model.layers=2", "model.heads=4", "model.kv_heads=2"]


def config(*overrides: str) -> Config:
    """A recipe whose model has the shape of `llama()`."""
    return load([*SHAPE, *overrides])


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """A LLaMA of transformers."""
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**TINY | changes)).to(dtype).eval()


def mixtral(**changes: Any) -> MixtralForCausalLM:
    """A Mixtral of transformers, with 8 experts and two per token."""
    torch.manual_seed(4)
    return MixtralForCausalLM(MixtralConfig(**TINY | changes, num_local_experts=8, num_experts_per_tok=2)).eval()


def qwen3(**changes: Any) -> Qwen3ForCausalLM:
    """A dense Qwen3 of transformers, with heads wider than hidden size / heads."""
    torch.manual_seed(5)
    return Qwen3ForCausalLM(Qwen3Config(**TINY | {"head_dim": 12} | changes)).eval()


def qwen3_moe(**changes: Any) -> Qwen3MoeForCausalLM:
    """A Qwen3 of transformers with 4 experts and two per token."""
    torch.manual_seed(6)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY | experts | {"head_dim": 12} | changes)).eval()


def saved(model: PreTrainedModel, folder: Path, shard: str = "5GB") -> Path:
    """Save a model with transformers, in shards of at most `shard` bytes."""
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The logits [T, vocab] that transformers computes for one sequence."""
    found: Tensor = model(tokens[None]).logits[0]
    return found


@torch.no_grad()
def our_logits(config: Config, folder: Path, tokens: Tensor) -> Tensor:
    """The logits [T, vocab] that our model computes in float32 with the weights of a folder."""
    model = build_model(config)
    load_weights(model, config.model, folder)
    return model(tokens, torch.arange(len(tokens)))  # type: ignore[no-any-return]
