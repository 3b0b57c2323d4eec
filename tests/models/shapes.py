"""Shapes of tiny models that several tests use.

Ranks of worlds import this module: it must not import transformers, which takes a second.
"""

from __future__ import annotations

from engine.config.load import load
from engine.config.schema import Model, Rope


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

LLAMA_SIZE = {
    "name": "tiny",
    "family": "llama",
    "hidden": 32,
    "ffn": 40,
    "head_size": None,
    "experts": 1,
    "top_k": 1,
    "norm_top_k": True,
    "vocab": 50,
    "layers": 2,
    "rope_theta": 10000.0,
    "rope": ROPES["none"],
    "norm_eps": 1e-5,
    "window": None,
    "windowed": (True,),
}
LLAMA = {
    "gqa": Model(**LLAMA_SIZE, heads=4, kv_heads=2, tied=False),
    "gqa tied": Model(**LLAMA_SIZE, heads=4, kv_heads=1, tied=True),
    "mha": Model(**LLAMA_SIZE, heads=4, kv_heads=4, tied=False),
    "mha tied, another base": Model(
        **LLAMA_SIZE | {"rope_theta": 5e5, "norm_eps": 1e-6}, heads=2, kv_heads=2, tied=True
    ),
    **{
        f"gqa, {name}": Model(**LLAMA_SIZE | {"rope": rope}, heads=4, kv_heads=2, tied=False)
        for name, rope in ROPES.items()
        if name != "none"
    },
}


def mixtral_shape(**changes: object) -> Model:
    tiny = {
        "family": "mixtral",
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 40,
        "experts": 8,
        "top_k": 2,
        "vocab": 50,
    }
    return load([]).model.model_copy(update=tiny | changes)


MIXTRAL = {
    "gqa": mixtral_shape(),
    "gqa tied": mixtral_shape(kv_heads=1, tied=True),
    "three of five, another base": mixtral_shape(experts=5, top_k=3, rope_theta=1e6, norm_eps=1e-6),
}

QWEN3_SIZE = {"family": "qwen3", "heads": 4, "kv_heads": 2, "head_size": 12, "norm_eps": 1e-6}
QWEN3 = {
    "gqa": mixtral_shape(**QWEN3_SIZE, experts=1, top_k=1),
    "tied, head size of the others": mixtral_shape(**QWEN3_SIZE | {"head_size": None}, experts=1, top_k=1, tied=True),
}
QWEN3_MOE = {
    "gqa": mixtral_shape(**QWEN3_SIZE | {"family": "qwen3_moe"}),
    "tied, probabilities not divided": mixtral_shape(
        **QWEN3_SIZE | {"family": "qwen3_moe"}, experts=5, top_k=3, norm_top_k=False, tied=True
    ),
}
