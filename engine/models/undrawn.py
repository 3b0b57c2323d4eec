"""PyTorch's layers, made without drawing their weights: a model's are drawn or loaded at once, by one seed.

PyTorch's own draw would be overwritten, and takes 14 s for 384M weights.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """A product with a matrix [outputs, inputs], without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class Embedding(nn.Embedding):
    """A row of numbers for each token."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""
