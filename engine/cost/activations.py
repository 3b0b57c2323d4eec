"""Bytes of a micro-batch on a device, in addition to the model states, from the memory table.

Rule 2 of `verify` and all memory estimates count these bytes and the states (states.py). The CUDA context and
fragmentation are not included (allowance.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from engine.config import schema
from engine.cost.flops import kinds
from engine.cost.stages import stages
from engine.cost.table import (
    ATTENTION,
    DEVICE,
    HEAD,
    KEPT,
    LAYER,
    LEAST_CHUNK,
    LOSS,
    LOSS_END,
    LOSS_FEW,
    LOSS_MANY,
    RINGS,
    SAVED,
    SWIGLU,
    TILE,
    TOKEN,
    letters,
    model_letters,
    total,
)
from engine.family.families import family_of
from engine.family.layers import LayerKind, merged, part


def saved_bytes(model: schema.Model, dtype: str, recompute: str = "none", tile: int = 0) -> int:
    """Bytes per token that the forward pass saves for the backward pass. `tile` is mlp_tile."""
    return layers_bytes(model, kinds(model), dtype, recompute, tile) + kept_bytes(model, dtype)


def layers_bytes(
    model: schema.Model, layers: Sequence[LayerKind], dtype: str, recompute: str = "none", tile: int = 0
) -> int:
    """Bytes per token that some of a model's layers save; these may be offloaded. `tile` is mlp_tile.

    A window changes nothing: a layer saves the q, k, v and output of each token once, whatever the pairs.
    """
    return sum(kind.count * layer_bytes(model, kind, dtype, recompute, tile) for kind in merged(layers))


def layer_bytes(model: schema.Model, kind: LayerKind, dtype: str, recompute: str = "none", tile: int = 0) -> int:
    """Bytes per token that one layer of a kind saves. `tile` is mlp_tile."""
    return total(SAVED, model_letters(model, dtype, recompute, tile, experts=kind.experts), TOKEN)


def kept_bytes(model: schema.Model, dtype: str) -> int:
    """Bytes per token that are saved outside the layers and are never offloaded."""
    return total(KEPT, model_letters(model, dtype), TOKEN)


def ring_bytes(model: schema.Model, dtype: str, stages: int = 1) -> int:
    """Bytes of a ring's buffers per token of its largest shard, in a pipeline of `stages`."""
    return total(RINGS, model_letters(model, dtype, stages=stages), TOKEN)


def counts_bytes(model: schema.Model, stages: int = 1) -> int:
    """Bytes of the messages of all stages with a shard's expert counts; 0 for a dense model.

    A message contains an int64 for each expert of each of the stage's layers, and one for the number of loss tokens.
    """
    layers = sum(kind.count for kind in kinds(model) if kind.experts)
    return 8 * (layers * model.experts + stages) if layers else 0


def loss_chunk(tokens: int, hidden: int, vocab: int) -> int:
    """Number of tokens of a micro-batch whose logits are computed at a time, at least 1.

    The logits of a chunk take twice the bytes of all hidden states: less than a layer's backward pass needs.
    """
    return max(1, min(tokens, max(LEAST_CHUNK, -(-2 * hidden * tokens // vocab))))


class Instant(NamedTuple):
    """Bytes on a device at an instant of a micro-batch, in addition to what the layers save."""

    fixed: int
    token: int  # for each token
    tile: int = 0  # tokens of a tile
    tiled: int = 0  # in addition, for each token of one tile

    def of(self, tokens: Any) -> Any:
        """Bytes of a micro-batch of `tokens`, a number or an array."""
        return self.fixed + self.token * tokens + self.tiled * np.minimum(tokens, self.tile)

    def most(self, available: int, saved: int) -> int:
        """Most tokens that fit in `available` bytes if each needs `saved` more; negative if `fixed` does not fit."""
        available, token = available - self.fixed, self.token + saved
        less_than_a_tile, more = available // (token + self.tiled), (available - self.tiled * self.tile) // token
        return max(less_than_a_tile, more)


def instants(config: schema.Config, stage: int = 0) -> tuple[Instant, ...]:
    """The instants at which a micro-batch may need the most memory on a device of a stage.

    They are, in this order: the backward pass of the last layer, and on the last stage the loss with chunks of 1,024
    tokens, the loss with larger chunks, the end of the loss, and the reduction of the head's gradient. The bytes of an
    instant are the sum of its rows in the memory table, divided by the tensor parallel degree and rounded up. What a
    stage keeps outside its layers is counted for all micro-batches in flight, which are taken to be as large.
    """
    model, tp, last = config.model, config.parallel.tp, stage == config.parallel.pp - 1
    layers = part(family_of(model).layers(model), stages(config)[stage])
    # The kind of layer that saves more needs more.
    values = letters(config, last=last, experts=any(kind.experts for kind in layers))
    kept = total(KEPT, values, TOKEN, "activations") + tp * total(KEPT, values, TOKEN, "positions")
    kept *= config.parallel.pp - stage

    def one(names: tuple[str, ...], tile: int = 0) -> Instant:
        """The instant whose bytes are the sums of the tables `names`."""
        fixed, token, tiled = (sum(total(name, values, each) for name in names) for each in (DEVICE, TOKEN, TILE))
        return Instant(-(-fixed // tp), -(-(kept + token) // tp), tile, -(-tiled // tp))

    # In a layer either SwiGLU or attention needs more; both have the same fixed bytes and tiles.
    layer = max(one((LAYER, part), config.mlp_tile) for part in (SWIGLU, ATTENTION))
    if not values["last"]:
        return (layer,)
    few, many, end = one((LOSS, LOSS_FEW), LEAST_CHUNK), one((LOSS, LOSS_MANY)), one((LOSS, LOSS_END))
    return layer, few, many, end, one((HEAD,))
