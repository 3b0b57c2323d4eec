"""Hugging Face's LLaMA for a shape of ours, also without its casts to float32."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, modeling_rope_utils
from transformers.models.llama import modeling_llama

from engine.config.schema import Model, Rope
from tests.models.huggingface import without_float32_casts


def rope(kind: str, **given: float) -> Rope:
    return Rope(**dict.fromkeys(Rope.model_fields) | {"kind": kind} | given)


ROPES = {
    "none": rope("none"),
    "linear": rope("linear", factor=4.0),
    "llama3": rope(
        "llama3", factor=8.0, original_max_position_embeddings=512, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    "yarn": rope("yarn", factor=16.0, original_max_position_embeddings=512),
    "yarn, DeepSeek's": rope(
        "yarn",
        factor=40.0,
        original_max_position_embeddings=512,
        beta_fast=30.0,
        beta_slow=2.0,
        mscale=1.0,
        mscale_all_dim=0.7,
    ),
    "yarn, own factor": rope("yarn", factor=2.0, original_max_position_embeddings=512, attention_factor=1.3),
}


def theirs_of(shape: Model) -> LlamaConfig:
    """Return their config of a shape."""
    scaling = {name: value for name, value in shape.rope.model_dump(exclude={"kind"}).items() if value is not None}
    kind = shape.rope.kind if shape.rope.kind != "none" else "default"
    original = shape.rope.original_max_position_embeddings or 512
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=int(original * (shape.rope.factor or 1)),
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": kind, "rope_theta": shape.rope_theta} | scaling,
        tie_word_embeddings=shape.tied,
        attn_implementation="eager",
        initializer_range=0.2,
    )


def huggingface(shape: Model, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return their model of a shape, with weights large enough that every part of it shows."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(theirs_of(shape)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def float64_huggingface() -> AbstractContextManager[None]:
    """Patch out the casts to float32 inside Hugging Face's LLaMA."""
    return without_float32_casts(modeling_llama, modeling_rope_utils)


def nearly_all_rounded_once(found: Tensor, exact: Tensor) -> bool:
    """Whether bf16 values are the exact ones rounded; float32 inside may tip the scales once in a thousand."""
    assert found.dtype == torch.bfloat16
    return bool((found == exact.bfloat16()).double().mean() > 0.995)
