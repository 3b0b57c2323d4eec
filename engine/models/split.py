"""How tensor parallelism splits the parameters of a model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.models.common.part import Part

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


def elements_of_slice(first: int, stop: int, shape: torch.Size, dim: int, part: Part) -> tuple[Tensor, Tensor]:
    """Find the elements first .. stop - 1 of a flattened parameter that are in a device's slice of shape `shape`.

    The parameter is split along `dim`. Returns the numbers of these elements, counted from `first`, and their numbers
    in the flattened slice.
    """
    each = math.prod(shape[dim:])  # consecutive elements of the slice
    outer, inner = torch.arange(first, stop).div(each * part.tp, rounding_mode="floor"), torch.arange(first, stop)
    inner = inner - outer * each * part.tp - part.tp_rank * each
    inside = ((inner >= 0) & (inner < each)).nonzero().flatten()
    return inside, (outer * each + inner)[inside]
