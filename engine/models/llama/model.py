"""LLaMA: single-device code on packed tokens. Which tokens meet in attention is the caller's `attend`, nothing else.

Letters: T tokens, C hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.config.schema import Model
from engine.memory import recompute
from engine.models.llama.layers import Attend, Layer, RMSNorm, rotation
from engine.models.loss import Head

_INIT_STD = 0.02  # LLaMA's initializer_range


class Llama(nn.Module):
    """The model of a shape (Touvron et al. 2023; grouped-query attention as in LLaMA 2)."""

    def __init__(self, shape: Model, mode: str = "none") -> None:
        """Make the model of a shape, which keeps for its backward pass what a recompute mode says."""
        super().__init__()
        self.shape, self.run_layer = shape, recompute.MODES[mode]
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.head = Head(shape.hidden, shape.vocab)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, labels: Tensor | None = None) -> Tensor:
        """Return the summed loss of labels [T] after tokens [T] at positions [T] in their sequences; T may be 0.

        Without labels the logits [T, vocab]. The loss is the model's, as it needs the head's weights, which ZeRO-3
        gathers for a forward pass only.
        """
        x = self.embedding(tokens)
        by = rotation(positions, self.shape.head_dim, self.shape.rope_theta, x.dtype)
        for layer in self.layers:
            x = self.run_layer(layer, x, by, attend)
        return self.head(self.norm(x), labels)  # type: ignore[no-any-return]

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the weights as LLaMA does: matrices from N(0, 0.02), norms 1. The same on every rank and world size."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, _INIT_STD, generator=generator)
            else:
                parameter.fill_(1)
