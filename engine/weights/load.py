"""Loads weights into a model, one file and one tensor at a time, so that no rank needs memory for two copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from engine.config.schema import Model
from engine.models.common.part import Part
from engine.weights.check import Place, places
from engine.weights.finite import is_finite, not_finite_error
from engine.weights.folder import read_headers

# Makes a context in which a parameter that is sharded over processes is whole. All processes enter the context; it
# yields True in those that must write the parameter.
Gather = Callable[[nn.Parameter], AbstractContextManager[bool]]


def no_gather(parameter: nn.Parameter) -> AbstractContextManager[bool]:
    """The `Gather` for parameters that are not sharded: yields True in every process."""
    return nullcontext(True)


@torch.no_grad()
def load_weights(model: nn.Module, shape: Model, folder: Path, gather: Gather = no_gather) -> None:
    """Load every parameter of a model, in place, from a Hugging Face folder that `check_weights` has accepted.

    Of the parameters of a part of a model, only the slices that it has are read. `gather` gives access to parameters
    that are sharded over ranks. Tensors are cast to the dtype of the parameter. Only one file is memory-mapped at a
    time, so the additional memory is at most that of the largest file. Raises DataError if a value is not finite.
    """
    target, part = places(model, shape), getattr(model, "part", None)
    names = sorted((header.file, name) for name, header in read_headers(folder).items() if name in target)
    bad: list[str] = []
    for file, entries in groupby(names, key=lambda entry: entry[0]):
        with safe_open(folder / file, framework="pt") as shard:
            for _, name in entries:
                with gather(target[name].parameter) as writes:
                    if not writes:
                        continue
                    _copy_slice(shard.get_slice(name), target[name], part)
                    bad += [] if is_finite(target[name].tensor) else [name]
    if bad:
        raise not_finite_error(bad, folder)


def _copy_slice(stored: Any, place: Place, part: Part | None) -> None:
    """Copy a slice of a safetensors tensor to its place. What pads the vocabulary becomes 0."""
    dim, target = place.split, place.tensor
    if part is None or part.tp == 1 or dim is None:
        target.copy_(stored[:])
        return
    size, each = stored.get_shape()[dim], target.shape[dim]
    rows = slice(min(size, part.tp_rank * each), min(size, (part.tp_rank + 1) * each))
    found = stored[rows] if dim == 0 else stored[:, rows]
    target.narrow(dim, 0, found.shape[dim]).copy_(found)
    target.narrow(dim, found.shape[dim], each - found.shape[dim]).zero_()
