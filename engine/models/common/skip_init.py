"""PyTorch's layers without their default initialisation, which takes 14 s for 384M weights.

The weights of the model are set afterwards, by `initialise.py` or from a checkpoint.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """`nn.Linear` without bias. Its weight is uninitialised memory."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Do nothing."""


class Embedding(nn.Embedding):
    """`nn.Embedding`. Its weight is uninitialised memory."""

    def reset_parameters(self) -> None:
        """Do nothing."""
