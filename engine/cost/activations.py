"""What a micro-batch makes a rank's memory hold beside the model states, in bytes.

With those (states.py) it is what rule 2 of `verify` and the launch are checked against. Not counted here: the runtime
itself and the allocator's gaps (allowance.py).
Letters: b bytes of an element in the model's dtype, w bytes in the wider of that and fp32 (norms, log-sum-exp, loss).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from engine.config import schema
from engine.cost.states import (
    coming_bytes,
    element_bytes,
    expert_elements,
    head_elements,
    lone_bytes,
    passing_bytes,
)

_LEAST_CHUNK = 1024  # tokens of the loss: smaller products would wait for the sum of the weight's gradient


def saved_bytes(model: schema.Model, dtype: str, recompute: str = "none", tile: int = 0) -> int:
    """Return what the forward pass keeps of a token for the backward pass."""
    return layers_bytes(model, dtype, recompute, tile) + staying_bytes(model, dtype)


def staying_bytes(model: schema.Model, dtype: str) -> int:
    """Return what of that is no layer's, and is never offloaded.

    The last norm keeps as much as any other; its output becomes the loss's gradient. All layers share the cosines and
    sines of a token's position: 2 head_dim w.
    """
    return _norm(model, dtype) + 2 * model.head_dim * element_bytes(dtype)[1]


def layers_bytes(model: schema.Model, dtype: str, recompute: str = "none", tile: int = 0) -> int:
    """Return what all layers keep of a token, by recompute mode.

    `layer` keeps each layer's input; `layer_keep_attention` also q, k, v, the output and the log-sum-exp. With `none` a
    LLaMA layer (h hidden, q = heads x head_dim, kv = kv_heads x head_dim, f = ffn, k = top_k) keeps
    - for each of its two norms the input, the output (which products take), and one number: 2 h b + w;
    - for attention q, k, v, the output (which is also the input of the last product) and the log-sum-exp of each
      head: (2 q + 2 kv) b + heads w;
    - for SwiGLU the gate, the other branch and the product that both make: 3 f b;
    - with experts k times that, each expert's input and output, 2 k h b, and what the router keeps (`_router`).
    With a `tile` (mlp_tile) SwiGLU and experts keep only their input.
    """
    b, _ = element_bytes(dtype)
    kept = {"none": _layer(model, dtype, tile), "layer": 0, "layer_keep_attention": _attention(model, dtype)}[recompute]
    entry = 0 if recompute == "none" else model.hidden * b + _said(model, dtype)
    return model.layers * (entry + kept)


def _norm(model: schema.Model, dtype: str) -> int:
    b, w = element_bytes(dtype)
    return 2 * model.hidden * b + w


def _attention(model: schema.Model, dtype: str) -> int:
    b, w = element_bytes(dtype)
    return 2 * (model.heads + model.kv_heads) * model.head_dim * b + model.heads * w


def _layer(model: schema.Model, dtype: str, tile: int = 0) -> int:
    ffn = _said(model, dtype) if tile else _ffn(model, dtype)
    return 2 * _norm(model, dtype) + _attention(model, dtype) + ffn


def _ffn(model: schema.Model, dtype: str) -> int:
    b, _ = element_bytes(dtype)
    experts = model.top_k * 2 * model.hidden * b + _router(model, dtype) if model.experts > 1 else 0
    return model.top_k * 3 * model.ffn * b + experts


def _router(model: schema.Model, dtype: str) -> int:
    """Return what a router keeps of a token: its input in the wider dtype, where `_norm` counts it in the model's own;
    what `_said` says, the softmax for its weights, and of each chosen expert its number, its row's place, the way
    back, and its weight before and after they are made to sum to one."""
    b, w = element_bytes(dtype)
    return model.hidden * (w - b) + _said(model, dtype) + model.experts * w + model.top_k * (3 * 8 + 3 * w)


def _said(model: schema.Model, dtype: str) -> int:
    """Return what the balance and z losses keep of a token and layer, whatever is recomputed: the router's logits,
    their softmax, the experts' weights in the loss, and the logits' log-sum-exp."""
    return (3 * model.experts + 1) * element_bytes(dtype)[1] if model.experts > 1 else 0


def working_bytes(model: schema.Model, dtype: str, recompute: str = "none", tile: int = 0) -> int:
    """Return what a layer's backward pass holds of a token beside what is saved, at its fullest; may be negative.

    It is fullest in the last layer, when the last norm has let go of its 2 h b + w and the residual stream's gradient
    is there. In SwiGLU those of its two inputs stand beside that of its output, whose place was the output's: 2 f b
    more; experts' outputs (k h b) are gone. In attention SwiGLU and its norm are gone too, and the gradients of the
    output and of q, in both dtypes, and of k and v are there. With recomputation there is what it computes anew. With a
    `tile` what is f-wide is there for so many tokens only (`tile_bytes`).
    """
    b, w = element_bytes(dtype)
    wide = 0 if tile else 2 * model.top_k * model.ffn * b
    stream = model.hidden * b - _norm(model, dtype)
    swiglu = stream + wide - (model.top_k * model.hidden * b if model.experts > 1 and not tile else 0)
    gone = _norm(model, dtype) + (_said(model, dtype) if tile else _ffn(model, dtype))
    heads, kv_heads = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = stream - gone + heads * (2 * b + w) + 2 * kv_heads * b
    again = {
        "none": 0,
        "layer": _layer(model, dtype, tile) - model.hidden * b,
        "layer_keep_attention": gone,
    }[recompute]
    return max(swiglu, attention) + again


def tile_bytes(model: schema.Model, dtype: str) -> tuple[int, int]:
    """Return what SwiGLU or experts compute anew of a tile's token in the backward pass with the gradients of that, and
    the gradients of the weights: a tile's own, and their sum in the wider dtype."""
    b, w = element_bytes(dtype)
    weights = 3 * model.experts * model.hidden * model.ffn
    return _ffn(model, dtype) + 3 * model.top_k * model.ffn * b, weights * (b + w)


def loss_chunk(tokens: int, hidden: int, vocab: int) -> int:
    """Return how many of a micro-batch's tokens have their logits in memory at a time, at least 1.

    As many as take twice the room of all the tokens' hidden states: less than a layer's backward pass needs.
    """
    return max(1, min(tokens, max(_LEAST_CHUNK, -(-2 * hidden * tokens // vocab))))


def loss_moments(model: schema.Model, dtype: str) -> tuple[Moment, ...]:
    """Return what the loss holds beside what is saved, with few tokens, with many, and at its end: the largest counts.

    The head's input, the logits of one chunk (`loss_chunk`) in the wider dtype, twice, and in that the gradient of the
    head's weight; at the end instead of logits that gradient in the model's dtype too.
    """
    b, w = element_bytes(dtype)
    head, entry, logits = head_elements(model) * w, model.hidden * b, 2 * model.vocab * w
    few = Moment(head, entry, _LEAST_CHUNK, logits)
    many = Moment(head + logits, entry + 2 * min(model.vocab, 2 * model.hidden) * w)
    return few, many, Moment(head + (head_elements(model) * b if b < w else 0), entry)


def ring_bytes(model: schema.Model, dtype: str) -> int:
    """Return the buffers of a ring, for each token of its largest shard: K,V and dK,dV, each held and on its way."""
    b, w = element_bytes(dtype)
    return 2 * (2 * model.kv_heads * model.head_dim) * (b + w)


def counts_bytes(model: schema.Model) -> int:
    """Return the message of the counts' rounds for a shard: 64 bits for each expert of each layer, and for its loss
    tokens."""
    return 8 * (model.layers * model.experts + 1) if model.experts > 1 else 0


class Moment(NamedTuple):
    """What is held beside layers' activations at a moment of a micro-batch, in bytes: fixed, and of a token.

    Where it runs in tiles there is what each token of one tile has on top.
    """

    fixed: int
    token: int
    tile: int = 0  # tokens
    tiled: int = 0  # bytes of each token of a tile

    def of(self, tokens: Any) -> Any:
        """Return the bytes with so many tokens, a number or an array of them."""
        return self.fixed + self.token * tokens + self.tiled * np.minimum(tokens, self.tile)

    def most(self, free: int, beside: int) -> int:
        """Return the most tokens with which it fits so many bytes, `beside` bytes of each token too."""
        free, token = free - self.fixed, self.token + beside
        return max(free // (token + self.tiled), (free - self.tiled * self.tile) // token)  # less than a tile, or more


def moments(config: schema.Config) -> tuple[Moment, ...]:
    """Return the fullest moments on a device beside what layers save: a layer's backward pass, the loss's, and the
    reduction of a head that is larger than a bucket.

    The head's gradient is there from the start where gradients wait for the end of the backward pass
    (`passing_bytes`), and where the embedding's, which comes last, is added to it.
    """
    model, dtype, tile, tp = config.model, config.dtype, config.mlp_tile, config.parallel.tp
    b, _ = element_bytes(dtype)
    fixed = head_elements(model) * b if passing_bytes(config) or model.tied else 0
    tiled, weights = tile_bytes(model, dtype) if tile else (0, 0)
    fixed += weights + lone_bytes(config, expert_elements(model))
    layer = Moment(fixed, working_bytes(model, dtype, config.recompute, tile), tile, tiled)
    reduced = Moment(lone_bytes(config, head_elements(model)), model.hidden * b)
    coming, losses = coming_bytes(config), loss_moments(model, dtype)
    losses = tuple(one._replace(fixed=one.fixed - coming) for one in losses)
    stays, found = staying_bytes(model, dtype), (layer, *losses, reduced)
    return tuple(
        Moment(-(-one.fixed // tp), -(-(stays + one.token) // tp), one.tile, -(-one.tiled // tp)) for one in found
    )
