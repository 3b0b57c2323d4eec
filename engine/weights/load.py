"""Loads weights into a model, one file and one tensor at a time, so that no rank needs memory for two copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from engine.config.schema import Model
from engine.weights.check import places
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

    `gather` gives access to parameters that are sharded over ranks. Tensors are cast to the dtype of
    the parameter. Only one file is memory-mapped at a time, so the additional memory is at most that of the largest
    file. Raises DataError if a loaded value is not finite.
    """
    target = places(model, shape)
    names = sorted((header.file, name) for name, header in read_headers(folder).items() if name in target)
    bad: list[str] = []
    for file, entries in groupby(names, key=lambda entry: entry[0]):
        with safe_open(folder / file, framework="pt") as shard:
            for _, name in entries:
                with gather(target[name].parameter) as writes:
                    if not writes:
                        continue
                    target[name].tensor.copy_(shard.get_tensor(name))
                    bad += [] if is_finite(target[name].tensor) else [name]
    if bad:
        raise not_finite_error(bad, folder)
