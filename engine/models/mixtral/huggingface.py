"""Names: ours and those of Hugging Face's MixtralForCausalLM, as data.

Their files hold one tensor an expert; ours are stacked, one parameter [E, out, in] a projection.
"""

from __future__ import annotations

from engine.models.llama.huggingface import NAMES as LLAMA

_MOE = "model.layers.{}.block_sparse_moe"

# Ours -> theirs; the first `{}` is the number of a layer, a second one that of an expert.
NAMES = {ours: theirs for ours, theirs in LLAMA.items() if ".ffn." not in ours} | {
    "layers.{}.ffn.router.weight": f"{_MOE}.gate.weight",
    "layers.{}.ffn.gate": f"{_MOE}.experts.{{}}.w1.weight",
    "layers.{}.ffn.up": f"{_MOE}.experts.{{}}.w3.weight",
    "layers.{}.ffn.down": f"{_MOE}.experts.{{}}.w2.weight",
}
