"""Initialises a model on its device, each process only the weights that it stores.

The weights are the same for every number of processes and every ZeRO stage: the random numbers of each block of a
parameter come from a generator that is seeded with the run's seed, the parameter's name and the block's number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.family.families import parameters_of
from engine.models.common.norm import norm_weights
from engine.models.common.part import Part
from engine.models.split import dim_of, elements_of_slice

BLOCK = 1 << 20  # elements
_STD = 0.02  # LLaMA's initializer_range


class Stored(NamedTuple):
    """The elements of a parameter that this process stores: `values` [n], the elements start .. start + n of it.

    `shape` is that of the parameter, of which each process has a shard under ZeRO-3.
    """

    values: Tensor
    start: int
    shape: torch.Size


def whole(parameter: nn.Parameter) -> Stored:
    """The part of a parameter that is not sharded: all of it."""
    return Stored(parameter.view(-1), 0, parameter.shape)


@torch.no_grad()
def initialise(
    model: nn.Module,
    seed: int,
    device: torch.device | str = "cpu",
    stored: Callable[[nn.Parameter], Stored] = whole,
) -> None:
    """Initialise a model as LLaMA does: matrices from a normal distribution with standard deviation 0.02, norms with 1.

    Random numbers are generated in float32 on `device`. The weights of a seed are different on a GPU and on a CPU, and
    on different models of GPU, because PyTorch distributes random numbers over as many threads as a GPU has. `stored`
    returns the part of a parameter that this process stores. The weights of a part of a model are slices of those that
    the whole model gets.
    """
    generator, norms = torch.Generator(device), norm_weights(model)
    part: Part | None = getattr(model, "part", None)
    model_shape: Any = getattr(model, "shape", None)
    table = parameters_of(model_shape) if part is not None else {}

    def drawn(name: str, block: int, size: int) -> Tensor:
        """Draw a block of a parameter of `size` elements."""
        generator.manual_seed(_block_seed(seed, name, block))
        # Always the whole block: a GPU's random numbers depend on how many are drawn at once.
        return torch.empty(min(BLOCK, size - block * BLOCK), device=device).normal_(0, _STD, generator=generator)

    # Each process generates whole blocks, numbered as in the whole parameter, and keeps the elements that it stores.
    # The weights therefore do not depend on how the model is divided.
    for name, parameter in model.named_parameters():
        values, start, shape = stored(parameter)
        if parameter in norms:
            values.fill_(1)
            continue
        dim = dim_of(table, name) if part is not None and part.tp > 1 else None
        # On the last stage of a pipeline a tied head is a parameter, with the same values as the embedding on the first
        # stage.
        if part is not None and name == "head.weight" and model_shape.tied:
            name = "embedding.weight"
        size = shape.numel()
        if part is not None and dim:  # rows are cut, so each block has elements of every device
            for block in range(-(-size * part.tp // BLOCK)):
                of_block = drawn(name, block, size * part.tp)
                first = block * BLOCK
                here, there = elements_of_slice(first, first + len(of_block), shape, dim, part)
                mine = (there >= start) & (there < start + len(values))
                here, there = here[mine].to(device), (there[mine] - start).to(device)
                values[there] = of_block[here].to(values.dtype)
            continue
        # A slice along dim 0 is contiguous in the whole parameter, so only its start is different on each device.
        if part is not None and dim == 0:
            start, size = start + part.tp_rank * size, size * part.tp
            if "layers." not in name:  # the vocabulary is padded with rows of zeros
                size = model_shape.vocab * shape[1]
                values[max(0, size - start) :].zero_()
                values = values[: max(0, size - start)]
        # The experts of an ep rank are contiguous, too, because experts are stacked in dim 0.
        if part is not None and part.ep > 1 and table[name].stacked:
            start, size = start + part.ep_rank * size, size * part.ep
        stop = start + len(values)
        for first in range(start - start % BLOCK, stop, BLOCK):
            of_block = drawn(name, first // BLOCK, size)
            low, high = max(start, first), min(stop, first + BLOCK)
            values[low - start : high - start].copy_(of_block[low - first : high - first])


def _block_seed(seed: int, name: str, block: int) -> int:
    """The seed of a block: 63 bits of a hash, so that no two blocks share their random numbers."""
    digest = hashlib.blake2b(f"{seed} {name} {block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
