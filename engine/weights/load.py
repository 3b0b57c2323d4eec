"""Weights into a model: shard by shard, tensor by tensor, so that a rank never holds two copies of a model."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from engine.config.schema import Model
from engine.models.llama.model import Whole, all_of_it
from engine.weights.check import places
from engine.weights.finite import is_finite, refusal
from engine.weights.folder import read_headers


@torch.no_grad()
def load_weights(model: nn.Module, shape: Model, folder: Path, gather: Whole = all_of_it) -> None:
    """Fill every parameter of a model from a Hugging Face folder that `check_weights` has passed.

    Beside the model's own bytes it needs those of the largest shard at most: files are mapped, one at a time, and each
    tensor is copied into its place, in the parameter's dtype, by the ranks that `gather` names. Raises DataError if
    some are not finite there.
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
        raise refusal(bad, folder)
