"""PyTorch's layers without their default initialisation, which takes 14 s for 384M weights.

The weights of the model are set afterwards, by `initialise.py` or from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.common.op import Op
from engine.models.common.product import PRODUCT


class Linear(nn.Linear):
    """`nn.Linear` without bias. Its weight is uninitialised memory."""

    product: Op = PRODUCT  # parallelize.py stacks others around it

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x [T,inputs] @ weight.T: [T,outputs]."""
        return self.product(x, self.weight)

    def reset_parameters(self) -> None:
        """Do nothing."""


class Embedding(nn.Embedding):
    """`nn.Embedding`. Its weight is uninitialised memory."""

    lookup: Callable[[Tensor, Tensor], Tensor] = staticmethod(F.embedding)  # tensor parallelism replaces it

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of the weight with the numbers `tokens` [T]."""
        return self.lookup(tokens, self.weight)

    def reset_parameters(self) -> None:
        """Do nothing."""
