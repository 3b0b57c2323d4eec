"""Our parameter names and those of Hugging Face's LlamaForCausalLM. Tensors have the same shape and layout."""

from __future__ import annotations

# Our name -> Hugging Face's name; `{}` is the layer number.
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
