"""All model families. A new one is an entry of `FAMILIES`, and a name in `Model.family` of engine/config/schema.py."""

from __future__ import annotations

from itertools import cycle, groupby, islice

from engine.family.family import Family
from engine.family.layers import LayerKind
from engine.family.parameters import HEAD, Parameter, of_ends
from engine.family.shape import Shape

_ATTENTION = {
    "embedding.weight": "model.embed_tokens.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.attention.q.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.k.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.v.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.out.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_DENSE = {
    "layers.{}.ffn.gate.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.ffn.up.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.ffn.down.weight": "model.layers.{}.mlp.down_proj.weight",
}
# Hugging Face stores a tensor for each expert; we stack those of a layer.
_MIXTRAL_MOE = "model.layers.{}.block_sparse_moe"
_MIXTRAL = {
    "layers.{}.ffn.router.weight": f"{_MIXTRAL_MOE}.gate.weight",
    "layers.{}.ffn.gate": f"{_MIXTRAL_MOE}.experts.{{}}.w1.weight",
    "layers.{}.ffn.up": f"{_MIXTRAL_MOE}.experts.{{}}.w3.weight",
    "layers.{}.ffn.down": f"{_MIXTRAL_MOE}.experts.{{}}.w2.weight",
}
_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
_QK_NORM = {
    "layers.{}.attention.q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
    "layers.{}.attention.k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
}
_QWEN3_MOE = {
    "layers.{}.ffn.router.weight": "model.layers.{}.mlp.gate.weight",
    "layers.{}.ffn.gate": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "layers.{}.ffn.up": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "layers.{}.ffn.down": "model.layers.{}.mlp.experts.{}.down_proj.weight",
}
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_QWEN3_FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


def _alike(model: Shape, *, experts: bool) -> tuple[LayerKind, ...]:
    """Layers that differ in nothing but whether they have the model's window."""
    windows = (model.window if windowed else None for windowed in islice(cycle(model.windowed), model.layers))
    return tuple(LayerKind(len(list(same)), window, experts) for window, same in groupby(windows))


def _all_dense(model: Shape) -> tuple[LayerKind, ...]:
    return _alike(model, experts=False)


def _all_experts(model: Shape) -> tuple[LayerKind, ...]:
    return _alike(model, experts=True)


_ALL = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        layers=_all_dense,
        tensors=_ATTENTION | _DENSE,
        keys=_KEYS,
        fixed=_FIXED,
        rope_theta=10000.0,
    ),
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        layers=_all_experts,
        tensors=_ATTENTION | _MIXTRAL,
        keys=_KEYS | {"experts": "num_local_experts", "top_k": "num_experts_per_tok"},
        fixed=_FIXED,
        rope_theta=1000000.0,
        experts=True,
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        layers=_all_dense,
        tensors=_ATTENTION | _QK_NORM | _DENSE,
        keys=_KEYS,
        fixed=_QWEN3_FIXED,
        rope_theta=10000.0,
        head_size=128,
        qk_norm=True,
    ),
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        layers=_all_experts,
        tensors=_ATTENTION | _QK_NORM | _QWEN3_MOE,
        keys=_KEYS
        | {"ffn": "moe_intermediate_size", "experts": "num_experts", "top_k": "num_experts_per_tok"}
        | {"norm_top_k": "norm_topk_prob"},
        spellings={"num_experts": "num_local_experts"},
        fixed=_QWEN3_FIXED | {"mlp_only_layers": [], "decoder_sparse_step": 1},
        rope_theta=10000.0,
        experts=True,
        qk_norm=True,
    ),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}


def family_of(model: Shape) -> Family:
    """Return the family of a model."""
    return FAMILIES[model.family]


def parameters_of(model: Shape) -> dict[str, Parameter]:
    """Return every parameter of a model by its name in the model, such as layers.0.attention.q.weight.

    A tied head is among them: a pipeline stage without the embedding has a copy of it.
    """
    family, number = family_of(model), 0
    embedding, *others = of_ends(model)
    found = {embedding.name: embedding}
    for kind in family.layers(model):
        layer = family.of_layer(model, kind)
        for _ in range(kind.count):
            found |= {f"layers.{number}.{one.name}": one for one in layer}
            number += 1
    return found | {one.name: one for one in others}


def stored_names(model: Shape) -> dict[str, tuple[str, ...]]:
    """Map the name of each of our parameters to the names of Hugging Face's tensors.

    Stacked experts have a tensor for each expert, in their order; every other parameter has one. The head of a tied
    model is left out.
    """
    parameters, names = parameters_of(model), dict[str, tuple[str, ...]]()
    for ours, theirs in family_of(model).tensors.items():
        for layer in range(model.layers if "{}" in ours else 1):
            parameter = parameters.get(ours.format(layer))  # layers of another kind do not have it
            if parameter is not None and not (ours == HEAD and model.tied):
                experts = range(model.experts if parameter.stacked else 1)
                names[ours.format(layer)] = tuple(theirs.format(layer, expert) for expert in experts)
    return names


def unnamed(experts: int) -> str:
    """Return the family of a model with `experts` per layer whose config does not name it, as in version 0.1."""
    return "mixtral" if experts > 1 else "llama"
