"""Attention of one sequence that a model reads piece by piece, as text generation does.

Letters: T tokens of a piece, N tokens of it and all pieces before it, H query heads, G key and value heads, D head
size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class CachedAttention:
    """Keeps the keys and values of all layers, so that each token passes through the model once.

    Takes the place of the attention of a micro-batch in a model's `forward` without labels. The model calls it once per
    layer, in order.
    """

    def __init__(self, layers: int, most: int) -> None:
        """`most` is the largest N; memory for the keys and values of so many tokens is allocated at the first piece."""
        self._layers, self._most = layers, most
        self._kept: list[tuple[Tensor, Tensor]] = []  # of each layer, [most,G,D]
        self._layer = 0  # the layer that calls next
        self.tokens = 0  # N of the last piece that all layers have seen

    def at(self, layer: int) -> CachedAttention:
        """Return the attention of one layer, which must call it next."""
        self._layer = layer
        return self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute attention from q [T,H,D], k and v [T,G,D] of a piece to the output [T,H,D].

        Each token attends to itself and to all tokens before it.
        """
        if len(self._kept) < self._layers:
            self._kept.append((k.new_empty(self._most, *k.shape[1:]), v.new_empty(self._most, *v.shape[1:])))
        start, stop = self.tokens, self.tokens + len(q)
        for kept, new in zip(self._kept[self._layer], (k, v), strict=True):
            kept[start:stop] = new
        keys, values = (kept[:stop].transpose(0, 1) for kept in self._kept[self._layer])
        # is_causal would align the piece with the first tokens, not with the last.
        mask = torch.ones(len(q), stop, dtype=torch.bool, device=q.device).tril(start)
        out = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True)
        self.tokens = stop if self._layer + 1 == self._layers else start
        return out.transpose(0, 1)
