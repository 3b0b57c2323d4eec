"""How tensor parallelism splits the parameters of a model, and expert parallelism those of its experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.common.part import Part

# The dim along which a parameter is split, by the end of its name. The others, norms and routers, are whole on
# every device.
SPLIT = {
    "embedding.weight": 0,
    "attention.q.weight": 0,
    "attention.k.weight": 0,
    "attention.v.weight": 0,
    "attention.out.weight": 1,
    "ffn.gate.weight": 0,
    "ffn.up.weight": 0,
    "ffn.down.weight": 1,
    "ffn.gate": 1,  # experts, stacked in dim 0
    "ffn.up": 1,
    "ffn.down": 2,
    "head.weight": 0,
}


def dim_of(name: str) -> int | None:
    """Return the dim along which the parameter `name` is split; None for a parameter that is whole on every device."""
    return next((dim for end, dim in SPLIT.items() if name == end or name.endswith(f".{end}")), None)


def is_of_experts(name: str) -> bool:
    """Return whether the parameter `name` has the stacked matrices of a layer's experts, which ep shares in dim 0."""
    return name.endswith(("ffn.gate", "ffn.up", "ffn.down"))


def slice_of(name: str, whole: Tensor, tp: int, rank: int) -> Tensor:
    """Return the slice of a parameter that device `rank` of `tp` stores: all of it if it is not split.

    Slices have equal sizes: the end of the vocabulary is padded with rows of zeros.
    """
    dim = dim_of(name)
    if dim is None or tp == 1:
        return whole
    padding = whole.new_zeros((-len(whole) % tp if dim == 0 else 0, *whole.shape[1:]))
    return torch.cat([whole, padding]).chunk(tp, dim)[rank]


def whole_shape(name: str, shape: torch.Size, tp: int, vocab: int) -> torch.Size:
    """Return the shape of a parameter of which a device of `tp` has a slice of `shape`; `vocab` is without padding."""
    dim = dim_of(name)
    if dim is None or tp == 1:
        return shape
    size = shape[dim] * tp if "layers." in name else vocab
    return torch.Size([*shape[:dim], size, *shape[dim + 1 :]])


class Run(NamedTuple):
    """Consecutive elements of a parameter, in two slices of it."""

    tp_rank: int  # of the device that has them in the first kind of slices
    start: int  # in the flattened slice of that device
    at: int  # counted from the first element that was asked for
    length: int


def runs(name: str, shape: torch.Size, start: int, stop: int, own: tuple[int, int], tp: int) -> Iterator[Run]:
    """Find elements start .. stop - 1 of one slice of a parameter, flattened, in the slices of `tp` devices.

    `shape` is that of the whole parameter. `own` are the degree and the rank of the one slice. Elements that pad the
    vocabulary are left out.
    """
    dim = dim_of(name)
    if dim is None or own[0] == tp:  # every device has all of it, or the slices are the same
        yield Run(0 if dim is None else own[1], start, 0, stop - start)
        return
    row = math.prod(shape[dim + 1 :])
    whole, (degree, rank) = shape[dim] * row, own  # consecutive elements along `dim`
    mine, theirs = (-(-shape[dim] // size) * row for size in (degree, tp))
    at = start
    while at < stop:
        outer, inner = divmod(at, mine)
        place, count = rank * mine + inner, min(mine - inner, stop - at)
        if place < whole:
            tp_rank, inside = divmod(place, theirs)
            count = min(count, theirs - inside, whole - place)
            yield Run(tp_rank, outer * theirs + inside, at - start, count)
        at += count


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
