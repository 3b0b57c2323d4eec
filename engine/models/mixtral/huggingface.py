"""Our parameter names and those of Hugging Face's MixtralForCausalLM.

Hugging Face stores one tensor per expert; we stack all experts into one parameter [E,out,in] per projection.
"""

from __future__ import annotations

from engine.models.llama.huggingface import NAMES as LLAMA

_MOE = "model.layers.{}.block_sparse_moe"

# Our name -> Hugging Face's name; the first `{}` is the layer number, the second the expert number.
NAMES = {ours: theirs for ours, theirs in LLAMA.items() if ".ffn." not in ours} | {
    "layers.{}.ffn.router.weight": f"{_MOE}.gate.weight",
    "layers.{}.ffn.gate": f"{_MOE}.experts.{{}}.w1.weight",
    "layers.{}.ffn.up": f"{_MOE}.experts.{{}}.w3.weight",
    "layers.{}.ffn.down": f"{_MOE}.experts.{{}}.w2.weight",
}
