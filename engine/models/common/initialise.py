"""Initialises a model. The weights are the same for every world size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from engine.models.common.norm import norm_weights

_STD = 0.02  # LLaMA's initializer_range

# Makes a context in which a parameter that is partitioned over processes is whole. All processes enter the context; it
# yields True in those that must write the parameter.
Gather = Callable[[nn.Parameter], AbstractContextManager[bool]]


def no_gather(parameter: nn.Parameter) -> AbstractContextManager[bool]:
    """The `Gather` for parameters that are not partitioned: yields True in every process."""
    return nullcontext(True)


@torch.no_grad()
def initialise(model: nn.Module, seed: int, gather: Gather = no_gather) -> None:
    """Initialise a model as LLaMA does: matrices from a normal distribution with standard deviation 0.02, norms with 1.

    All parameters use one generator, in their order in the model, so `seed` gives the same weights at any world size.
    `gather` gives access to partitioned parameters.
    """
    generator, norms = torch.Generator().manual_seed(seed), norm_weights(model)
    for parameter in model.parameters():
        with gather(parameter) as writes:
            if not writes:
                continue
            if parameter in norms:
                parameter.fill_(1)
            else:
                # Random numbers are always generated in float32 on the CPU, so dtype and device do not change them.
                parameter.copy_(torch.empty(parameter.shape).normal_(0, _STD, generator=generator))
