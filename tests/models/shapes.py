"""Shapes of tiny models that several tests use."""

from __future__ import annotations

from engine.config.load import load
from engine.config.schema import Model
from tests.models.huggingface import ROPES

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
