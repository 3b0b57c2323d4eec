"""Model FLOPs, counted as usual for MFU.

A product of an [m, k] and a [k, n] matrix is 2mkn operations. The backward pass has two such products for each one of
the forward pass, so a step has three times the FLOPs of the forward pass.

- Linear layers: 2 operations per weight and token. The embedding is a look-up and costs nothing; the head is a product
  and counts. Only the top k experts of a token count.
- Attention: 2 head_dim operations for a score and 2 head_dim for its product with the value, so 4 head_dim per head,
  layer and causal pair. The scores that a fused backward pass recomputes do not count.
"""

from __future__ import annotations

from engine.config import schema

PASSES = 3  # forward, and a backward pass of twice as many operations
WHOLE = 1 << 62  # as a window: queries attend to all tokens before them


def pairs(tokens: int, window: int = WHOLE) -> int:
    """Pairs of the first `tokens` tokens of a sequence, where a query has at most `window` keys, its own included."""
    fewer = min(tokens, window)  # queries with fewer keys than the window
    return fewer * (fewer + 1) // 2 + (tokens - fewer) * window


def layer_weights(model: schema.Model, *, experts: int) -> int:
    """Number of weights in a layer's matrices, counting `experts` of its experts (1 in a dense model)."""
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    router = model.experts if model.experts > 1 else 0
    return model.hidden * (2 * wide + 2 * narrow + experts * 3 * model.ffn + router)


def linear_weights(model: schema.Model) -> int:
    """Number of weights that each token is multiplied with: all matrices except the embedding and unused experts."""
    return model.layers * layer_weights(model, experts=model.top_k) + model.hidden * model.vocab


def linear_flops(model: schema.Model) -> int:
    """Forward FLOPs of a token in all linear layers."""
    return 2 * linear_weights(model)


def attention_flops(model: schema.Model) -> int:
    """Forward FLOPs of one (query, key) pair in all layers."""
    return 4 * model.heads * model.head_dim * model.layers


def ffn_ratio(model: schema.Model) -> float:
    """Fraction of a token's `linear_weights` that are in SwiGLU, or in its experts."""
    return model.layers * model.top_k * 3 * model.ffn * model.hidden / linear_weights(model)
