"""The slices of parameters under tensor parallelism, for comparison with what devices store and load."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.family.parameters import Parameter


def slice_of(parameter: Parameter, whole: Tensor, tp: int, rank: int) -> Tensor:
    """Return the slice of a parameter that device `rank` of `tp` stores: all of it if it is not split.

    Slices have equal sizes: the end of the vocabulary is padded with rows of zeros.
    """
    dim = parameter.split
    if dim is None or tp == 1:
        return whole
    padding = whole.new_zeros((-len(whole) % tp if dim == 0 else 0, *whole.shape[1:]))
    return torch.cat([whole, padding]).chunk(tp, dim)[rank]
