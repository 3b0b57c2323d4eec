"""How tensor parallelism splits the parameters of a model."""

from __future__ import annotations

import torch
from torch import Tensor

# The dim along which a parameter is split, by the end of its name. The others, norms, are whole on every device.
SPLIT = {
    "embedding.weight": 0,
    "attention.q.weight": 0,
    "attention.k.weight": 0,
    "attention.v.weight": 0,
    "attention.out.weight": 1,
    "ffn.gate.weight": 0,
    "ffn.up.weight": 0,
    "ffn.down.weight": 1,
    "head.weight": 0,
}


def dim_of(name: str) -> int | None:
    """Return the dim along which the parameter `name` is split; None for a parameter that is whole on every device."""
    return next((dim for end, dim in SPLIT.items() if name == end or name.endswith(f".{end}")), None)


def slice_of(name: str, whole: Tensor, tp: int, rank: int) -> Tensor:
    """Return the slice of a parameter that device `rank` of `tp` stores: all of it if it is not split.

    Slices have equal sizes: the end of the vocabulary is padded with rows of zeros.
    """
    dim = dim_of(name)
    if dim is None or tp == 1:
        return whole
    padding = whole.new_zeros((-len(whole) % tp if dim == 0 else 0, *whole.shape[1:]))
    return torch.cat([whole, padding]).chunk(tp, dim)[rank]
