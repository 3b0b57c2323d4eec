"""Names: ours and those of Hugging Face's LlamaForCausalLM, as data. Tensors have the same shape and layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

# Ours -> theirs; `{}` is the number of a layer.
NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.out.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "layers.{}.ffn.gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.ffn.up.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.ffn.down.weight": "model.layers.{}.mlp.down_proj.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def name_map(layers: int) -> dict[str, str]:
    """Return ours -> theirs for a model of so many layers."""
    return {
        ours.format(layer): theirs.format(layer)
        for ours, theirs in NAMES.items()
        for layer in range(layers if "{}" in ours else 1)
    }


def from_huggingface(state: Mapping[str, Value], layers: int) -> dict[str, Value]:
    """Return their state dict under our names. Raises KeyError for a missing one."""
    return {ours: state[theirs] for ours, theirs in name_map(layers).items()}


def to_huggingface(state: Mapping[str, Value], layers: int) -> dict[str, Value]:
    """Return our state dict under their names. Raises KeyError for a missing one."""
    return {theirs: state[ours] for ours, theirs in name_map(layers).items()}
