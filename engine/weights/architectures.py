"""The models that Hugging Face and we both know, as data: what they are called there, their tensors, their keys.

A new architecture is an entry here and a table of names beside its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.config.schema import Model
from engine.models.llama.huggingface import NAMES as LLAMA_NAMES
from engine.models.mixtral.huggingface import NAMES as MIXTRAL_NAMES

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
_MOE_KEYS = {"experts": "num_local_experts", "top_k": "num_experts_per_tok"}
HEAD = "head.weight"  # no tensor of its own where it is the embedding's


@dataclass(frozen=True)
class Architecture:
    """A model as config.json and the tensors' files name it."""

    name: str
    model_type: str
    tensors: Mapping[str, str]  # ours -> theirs; `{}` is the layer, a second one the expert, whose tensors are stacked
    keys: Mapping[str, str]  # keys of our model's shape -> those of config.json
    rope_theta: float  # where config.json does not say


ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "llama", LLAMA_NAMES, _KEYS, 10000.0),
    Architecture("MixtralForCausalLM", "mixtral", MIXTRAL_NAMES, _KEYS | _MOE_KEYS, 1000000.0),
)


def architecture_of(shape: Model) -> Architecture:
    """Return the architecture of a model's shape."""
    dense, moe = ARCHITECTURES
    return moe if shape.experts > 1 else dense


def tensor_names(shape: Model) -> dict[str, tuple[str, ...]]:
    """Return ours -> theirs for every parameter; of several, tensor e is entry e of ours."""
    names: dict[str, tuple[str, ...]] = {}
    for ours, theirs in architecture_of(shape).tensors.items():
        if ours == HEAD and shape.tied:
            continue
        for layer in range(shape.layers if "{}" in ours else 1):
            experts = range(shape.experts if theirs.count("{}") == 2 else 1)
            names[ours.format(layer)] = tuple(theirs.format(layer, expert) for expert in experts)
    return names
