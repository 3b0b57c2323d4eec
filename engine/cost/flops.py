"""Model FLOPs, counted as usual for MFU.

A product of an [m, k] and a [k, n] matrix is 2mkn operations. The backward pass has two such products for each one of
the forward pass, so a step has three times the FLOPs of the forward pass.

- Linear layers: 2 operations per weight and token. The embedding is a look-up and costs nothing; the head is a product
  and counts. Only the top k experts of a token count.
- Attention: 2 head_dim operations for a score and 2 head_dim for its product with the value, so 4 head_dim per head,
  layer and (query, key) pair. In layers with a window a query has only the keys of the window. The scores that a fused
  backward pass recomputes do not count.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.config import schema
from engine.family.families import family_of
from engine.family.layers import LayerKind, merged
from engine.family.parameters import LINEAR_KINDS, LinearKind

PASSES = 3  # forward, and a backward pass of twice as many operations
PER_WEIGHT = 2  # operations of a token
WHOLE = 1 << 62  # as a window: queries attend to all tokens before them


def pairs(tokens: int, window: int = WHOLE) -> int:
    """Pairs of the first `tokens` tokens of a sequence, where a query has at most `window` keys, its own included."""
    fewer = min(tokens, window)  # queries with fewer keys than the window
    return fewer * (fewer + 1) // 2 + (tokens - fewer) * window


class Attention(NamedTuple):
    """Layers with the same attention window."""

    window: int  # most keys of a query; WHOLE without a window
    flops: int  # forward, of one (query, key) pair in all of them


def kinds(model: schema.Model) -> tuple[LayerKind, ...]:
    """The kinds of a model's layers, each once: what sums over layers go over."""
    return merged(family_of(model).layers(model))


def layer_weights(model: schema.Model, kind: LayerKind, *, experts: int) -> int:
    """Number of weights in the matrices of a layer of a kind, counting `experts` of its experts, if it has any."""
    matrices = (one for one in family_of(model).of_layer(model, kind) if one.is_matrix)
    return sum(one.elements // model.experts * experts if one.stacked else one.elements for one in matrices)


def largest_layer(model: schema.Model, *, experts: int) -> int:
    """The most weights in the matrices of a layer, counting `experts` of its experts."""
    return max(layer_weights(model, kind, experts=experts) for kind in kinds(model))


def layer_products(model: schema.Model, kind: LayerKind) -> dict[LinearKind, int]:
    """Number of weights of a layer that each token is multiplied with, by the kind of their matrix."""
    found = dict.fromkeys(LINEAR_KINDS, 0)
    for one in family_of(model).of_layer(model, kind):
        if one.linear is not None:
            found[one.linear] += one.elements // model.experts * model.top_k if one.stacked else one.elements
    return found


def products(model: schema.Model) -> dict[LinearKind, int]:
    """Number of weights that each token is multiplied with: all matrices except the embedding and unused experts."""
    layers = [(kind.count, layer_products(model, kind)) for kind in kinds(model)]
    found = {of: sum(count * weights[of] for count, weights in layers) for of in LINEAR_KINDS}
    found["head"] += model.hidden * model.vocab
    return found


def linear_flops(model: schema.Model) -> int:
    """Forward FLOPs of a token in all linear layers."""
    return PER_WEIGHT * sum(products(model).values())


def attention(model: schema.Model) -> tuple[Attention, ...]:
    """The model's layers by their attention window."""
    counts: dict[int, int] = {}
    for kind in kinds(model):
        window = WHOLE if kind.window is None else kind.window
        counts[window] = counts.get(window, 0) + kind.count
    return tuple(Attention(window, 4 * model.heads * model.head_dim * count) for window, count in counts.items())


def attention_flops(layers: tuple[Attention, ...], tokens: int) -> int:
    """Forward FLOPs of attention over a sequence of `tokens` in `layers`."""
    return sum(one.flops * pairs(tokens, one.window) for one in layers)
