"""Our model families and the matching ones of Hugging Face, as data: names, tensors and config keys.

To add a family, add an entry here and a table of tensor names in the folder of its model.
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
HEAD = "head.weight"  # tied models do not have this tensor


@dataclass(frozen=True)
class Architecture:
    """A model family, with the names that Hugging Face's config.json and safetensors files use."""

    name: str
    model_type: str
    tensors: Mapping[str, str]  # our parameter -> their tensor; `{}` is the layer, a second one the expert
    keys: Mapping[str, str]  # our keys of `model` -> keys of config.json
    rope_theta: float  # the default if config.json has none


ARCHITECTURES = (
    Architecture("LlamaForCausalLM", "llama", LLAMA_NAMES, _KEYS, 10000.0),
    Architecture("MixtralForCausalLM", "mixtral", MIXTRAL_NAMES, _KEYS | _MOE_KEYS, 1000000.0),
)


def architecture_of(shape: Model) -> Architecture:
    """Return the family of a model: Mixtral if it has several experts, else LLaMA, as in `engine/models/build.py`."""
    name = "mixtral" if shape.experts > 1 else "llama"
    return next(one for one in ARCHITECTURES if one.model_type == name)


def tensor_names(shape: Model) -> dict[str, tuple[str, ...]]:
    """Map the name of each of our parameters to the names of Hugging Face's tensors.

    A parameter that stacks the experts has one tensor per expert, in the order of its entries; every other parameter
    has one tensor. The head of a tied model is left out.
    """
    names: dict[str, tuple[str, ...]] = {}
    for ours, theirs in architecture_of(shape).tensors.items():
        if ours == HEAD and shape.tied:
            continue
        for layer in range(shape.layers if "{}" in ours else 1):
            experts = range(shape.experts if theirs.count("{}") == 2 else 1)
            names[ours.format(layer)] = tuple(theirs.format(layer, expert) for expert in experts)
    return names
