"""LLaMA (Touvron et al. 2023), with grouped-query attention as in LLaMA 2: single-device code on packed tokens.

`engine/models/parallelize.py` adds recompute, offload, tiles and compiled operations; rings come with the attention
context of each micro-batch.

Letters: T tokens, C hidden size, H query heads, G key and value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from engine.config.schema import Model
from engine.models.common.attention import Attention, LocalAttention, PackedAttention
from engine.models.common.loss import Head
from engine.models.common.norm import RMSNorm
from engine.models.common.part import Between, Part
from engine.models.common.rope import Rotation, rotary_embedding
from engine.models.common.skip_init import Embedding
from engine.models.common.swiglu import FeedForward


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Model, tp: int = 1) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.attention = Attention(shape, tp)
        self.ffn_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.ffn = FeedForward(shape, tp)

    def forward(self, x: Tensor, rotation: Rotation, attention: PackedAttention) -> Tensor:
        """Compute the residual stream [T,C] after the layer from the residual stream x [T,C] before it."""
        return self.after_attention(x, attention(*self.before_attention(x, rotation)))

    # The layer is split into two methods, so that recompute can save the tensors between them (recompute.py).

    def before_attention(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Compute q [T,H,D], k and v [T,G,D] from the residual stream x [T,C]."""
        return self.attention.project(self.attention_norm(x), rotation)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Compute the rest of the layer from its input x [T,C] and the output of attention [T,H,D]. Returns [T,C]."""
        x = x + self.attention.output(attended)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A LLaMA model of the given shape, or a part of it. Its weights are uninitialised: call `initialise` or load them
    before use.

    Layers are numbered as in the whole model. With tied weights, a part with the head but without the embedding has a
    copy of the tied weight, named `head.weight`.
    """

    def __init__(self, shape: Model, part: Part | None = None) -> None:
        super().__init__()
        part = part or Part.whole(shape)
        self.shape, self.part = shape, part
        self.run_layer: Callable[..., Any] = nn.Module.__call__  # parallelize.py wraps it
        self.embedding = Embedding(part.vocab_rows(shape), shape.hidden) if part.first else None
        self.layers = nn.ModuleDict({str(number): Layer(shape, part.tp) for number in part.layers})
        self.norm = RMSNorm(shape.hidden, shape.norm_eps) if part.last else None
        self.head = Head(shape.hidden, part.vocab_rows(shape)) if part.last else None
        if shape.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        labels: Tensor | None = None,
        attention: PackedAttention | None = None,
    ) -> Tensor | Between:
        """Compute the logits [T,V] of packed tokens [T]; with `labels` [T], their summed cross-entropy in nats instead.

        `positions` [T] count from 0 within each sequence. Labels equal to `IGNORE` are ignored. If `attention`
        is None, every sequence is assumed to be complete on this device.

        A part without the embedding takes the residual stream [R,C] of the part before it in place of `tokens`; one
        without the head returns it as `Between`. R is T, or the rows of one device under tensor parallelism.
        """
        attention = LocalAttention(positions) if attention is None else attention
        x = tokens if self.embedding is None else self.embedding(tokens)
        rotation = rotary_embedding(positions, self.shape, x.dtype)
        for number, layer in self.layers.items():
            x = self.run_layer(layer, x, rotation, attention.at(int(number)))
        if self.head is None or self.norm is None:
            return Between(x)
        return self.head(self.norm(x), labels)  # type: ignore[no-any-return]
