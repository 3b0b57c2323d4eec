"""What tokens cost in floating-point operations, forward and backward, in integers.

Counted as the field counts model FLOPs: a product of an [m, k] and a [k, n] matrix is 2mkn operations, and the
backward pass is two such products for each one of the forward pass, so everything is three times the forward pass.

- Linear layers: 2 operations a weight and a token, three times: 6 a weight. The embedding is a look-up and costs none;
  the output head is a product and counts.
- Attention: a query meets a key in 2 head_dim operations (the score) and their value in 2 more, so 4 head_dim a head,
  three times: 12 heads head_dim a layer and causal pair. That a fused backward computes the scores once more is work
  but no useful work, and is left out as in model FLOPs utilisation.

Units of 1,000 operations: the whole step must fit 63 bits. A 70B model (80 layers, 64 heads of 128) at 2M tokens has
2.2e12 pairs of 7.9e6 operations, 1.7e19 in all, above 2^63 = 9.2e18; in our units 1.7e16, and 500 of them still fit.
"""

from __future__ import annotations

from engine.config import schema

UNIT = 1_000  # floating-point operations in one cost unit

# A micro-batch reads all weights however few its tokens are. On a data-sheet GPU that read takes as long as computing
# 100 to 300 tokens (an H100: 989e12 FLOP/s over 3.35e12 B/s). Nominal until profile-hardware measures it.
FIXED_TOKENS = 128


def linear_weights(model: schema.Model) -> int:
    """Return the weights that each token is multiplied with: all matrices but the embedding, the head included."""
    wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = model.hidden * (2 * wide + 2 * narrow + 3 * model.ffn)
    return model.layers * layer + model.hidden * model.vocab


def linear_units(model: schema.Model) -> int:
    """Return the cost of a token in the linear layers, forward and backward, in units."""
    return _units(6 * linear_weights(model))


def attention_units(model: schema.Model) -> int:
    """Return the cost of one (query, key) pair in all layers, forward and backward, in units."""
    return _units(12 * model.heads * model.head_dim * model.layers)


def _units(flops: int) -> int:
    return -(-flops // UNIT)  # rounded up: nothing is free
