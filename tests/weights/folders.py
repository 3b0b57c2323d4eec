"""Tiny random models of Hugging Face's own, and the folders that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from engine.attention.kernels.choice import choose
from engine.attention.layout import whole
from engine.attention.meeting import Meeting
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
    """Return a recipe whose model is `llama()`'s."""
    return load([*SHAPE, *overrides])


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """Return a LLaMA of theirs."""
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**TINY | changes)).to(dtype).eval()


def mixtral() -> MixtralForCausalLM:
    """Return a Mixtral of theirs, with 8 experts of which each token takes two."""
    torch.manual_seed(4)
    return MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=8, num_experts_per_tok=2)).eval()


def saved(model: PreTrainedModel, folder: Path, shard: str = "5GB") -> Path:
    """Write a model as they do, in shards of at most `shard` bytes."""
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return their logits [T, vocab] of one sequence."""
    found: Tensor = model(tokens[None]).logits[0]
    return found


def alone(tokens: int) -> Meeting:
    """Return how the tokens of one whole sequence meet."""
    kernel = choose(torch.device("cpu"), torch.float32, 8)
    return Meeting(whole(tokens), None, kernel)


@torch.no_grad()
def our_logits(config: Config, folder: Path, tokens: Tensor) -> Tensor:
    """Return the logits [T, vocab] of one sequence that our model computes in float32 with a folder's weights."""
    model = build_model(config)
    load_weights(model, config.model, folder)
    return model(tokens, torch.arange(len(tokens)), alone(len(tokens)))  # type: ignore[no-any-return]
