"""Work of linear layers, whose kinds may run at different rates: for example one in FP8 and one in bf16, or kernels of
experts.

It is counted in weights of the kind `head`: n weights of another kind are as many weights of this one as take equally
long. Where all kinds have one rate, work is exactly the number of weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.config import schema
from engine.cost import flops
from engine.cost.calibration import Calibration
from engine.family.parameters import LinearKind


def work(weights: Mapping[LinearKind, int], rates: Calibration) -> float:
    """The work of so many weights of each kind."""
    return sum(count * (rates.head_flops_per_s / rates.linear(kind)) for kind, count in weights.items())


def token_seconds(model: schema.Model, tp: int, rates: Calibration) -> float:
    """Seconds of a token in the linear layers of a model that `tp` devices share, forward."""
    return flops.PER_WEIGHT * work(flops.products(model), rates) / tp / rates.head_flops_per_s


def ffn_share(model: schema.Model, rates: Calibration) -> float:
    """Fraction of a token's work that is in SwiGLU, or in its experts."""
    weights = flops.products(model)
    return work({"ffn": weights["ffn"], "expert": weights["expert"]}, rates) / work(weights, rates)
