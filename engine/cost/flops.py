"""Model FLOPs: what a model's tokens cost, counted as the field counts it.

A product of an [m, k] and a [k, n] matrix is 2mkn operations; the backward pass is two such products for each one of
the forward pass, so a whole step is three times the forward pass.

- Linear layers: 2 operations a weight and a token. The embedding is a look-up and costs none; the output head is a
  product and counts. Of experts only the top k that a token is sent to count.
- Attention: a query meets a key in 2 head_dim operations (the score) and their value in 2 more, so 4 head_dim a head,
  layer and causal pair. That a fused backward pass computes the scores once more is work but no useful work.
"""

from __future__ import annotations

from engine.config import schema

PASSES = 3  # forward, and a backward pass of twice as many operations


def layer_weights(model: schema.Model, *, experts: int) -> int:
    """Return the weights of a layer's matrices, with `experts` of its experts (1 in a dense model)."""
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    router = model.experts if model.experts > 1 else 0
    return model.hidden * (2 * wide + 2 * narrow + experts * 3 * model.ffn + router)


def linear_weights(model: schema.Model) -> int:
    """Return the weights that each token is multiplied with: all matrices but the embedding, the head included."""
    return model.layers * layer_weights(model, experts=model.top_k) + model.hidden * model.vocab


def linear_flops(model: schema.Model) -> int:
    """Return the forward FLOPs of a token in all linear layers."""
    return 2 * linear_weights(model)


def attention_flops(model: schema.Model) -> int:
    """Return the forward FLOPs of one (query, key) pair in all layers."""
    return 4 * model.heads * model.head_dim * model.layers


def ffn_share(model: schema.Model) -> float:
    """Return the share of SwiGLU, or of a token's experts, in its linear layers."""
    return model.layers * model.top_k * 3 * model.ffn * model.hidden / linear_weights(model)
