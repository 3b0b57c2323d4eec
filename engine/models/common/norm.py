"""RMSNorm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.models.common.op import Op
from engine.models.common.part import as_it_is
from engine.models.common.pointwise import NORM


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019).

    x is normalised in at least float32, and rounded to its dtype before it is multiplied by the weight.
    """

    op: Op = NORM
    shared: Callable[[Tensor], Tensor] = staticmethod(as_it_is)  # tensor parallelism replaces it

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [T,size] or [T,H,size] over its last dimension; the result has its shape and dtype."""
        return self.op(x, self.shared(self.weight), self.eps)


def norm_weights(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights of all RMSNorm modules. Shapes cannot identify them: ZeRO-3 flattens every parameter."""
    return {module.weight for module in model.modules() if isinstance(module, RMSNorm)}
