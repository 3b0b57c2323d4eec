"""Initialises a model on its device, each process only the weights that it stores.

The weights are the same for every number of processes and every ZeRO stage: each block of a parameter has random
numbers of its own, from a generator that is seeded with the run's seed, the parameter's name and the block's number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.models.common.norm import norm_weights

BLOCK = 1 << 20  # elements
_STD = 0.02  # LLaMA's initializer_range


class Part(NamedTuple):
    """The elements of a parameter that this process stores: `values` [n], elements start .. start + n of `size`."""

    values: Tensor
    start: int
    size: int


def whole(parameter: nn.Parameter) -> Part:
    """The part of a parameter that is not sharded: all of it."""
    return Part(parameter.view(-1), 0, parameter.numel())


@torch.no_grad()
def initialise(
    model: nn.Module, seed: int, device: torch.device | str = "cpu", stored: Callable[[nn.Parameter], Part] = whole
) -> None:
    """Initialise a model as LLaMA does: matrices from a normal distribution with standard deviation 0.02, norms with 1.

    Random numbers are generated in float32 on `device`. The same seed gives other weights on a GPU than on a CPU, and
    on another model of GPU, because PyTorch distributes random numbers over as many threads as a GPU has.
    `stored` returns the part of a parameter that this process stores.
    """
    generator, norms = torch.Generator(device), norm_weights(model)
    for name, parameter in model.named_parameters():
        values, start, size = stored(parameter)
        if parameter in norms:
            values.fill_(1)
            continue
        stop = start + len(values)
        for first in range(start - start % BLOCK, stop, BLOCK):
            generator.manual_seed(_block_seed(seed, name, first // BLOCK))
            # Always the whole block: a GPU's random numbers depend on how many are drawn at once.
            drawn = torch.empty(min(BLOCK, size - first), device=device).normal_(0, _STD, generator=generator)
            low, high = max(start, first), min(stop, first + BLOCK)
            values[low - start : high - start].copy_(drawn[low - first : high - first])


def _block_seed(seed: int, name: str, block: int) -> int:
    """The seed of a block: 63 bits of a hash, so that no two blocks share their random numbers."""
    digest = hashlib.blake2b(f"{seed} {name} {block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
