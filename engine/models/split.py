"""How tensor parallelism splits the parameters of a model, and expert parallelism those of its experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from engine.family.parameters import Parameter, Parameters
from engine.models.common.part import Part


def dim_of(table: Parameters, name: str) -> int | None:
    """Return the dim along which a tensor is split; None for a parameter that is whole on every device, or a buffer."""
    return table[name].split if name in table else None


class Run(NamedTuple):
    """Consecutive elements of a parameter, in two slices of it."""

    tp_rank: int  # of the device that has them in the first kind of slices
    start: int  # in the flattened slice of that device
    at: int  # counted from the first requested element
    length: int


def runs(parameter: Parameter, start: int, stop: int, own: tuple[int, int], tp: int) -> Iterator[Run]:
    """Find elements start .. stop - 1 of one slice of a parameter, flattened, in the slices of `tp` devices.

    `own` are the degree and the rank of the one slice. Elements that pad the vocabulary are left out.
    """
    dim, shape = parameter.split, parameter.shape
    if dim is None or own[0] == tp:  # every device has all of it, or the slices are the same
        yield Run(own[1] % tp, start, 0, stop - start)
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
