"""The table of optimizers. To add one, write what builds it and an entry; memory, config and checkpoints read the rest.

An optimizer runs on flat tensors: ZeRO joins the parameters of a kind, and each rank updates its part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import schema
from engine.tables import Table, lazy

KINDS = ("matrix", "vector", "expert")  # of parameters: matrices, norms, and stacked matrices of experts
States = Mapping[str, tuple[str, ...]]


def alike(*names: str) -> States:
    """Return the states of an optimizer that keeps the same for each kind of parameter."""
    return dict.fromkeys(KINDS, names)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, and what others need to know of it.

    build: `build(groups, settings)` returns PyTorch's optimizer of parameter groups by kind, with their weight decay;
        kinds without parameters are left out. It must also run on CPU tensors, for `optimizer.on_host`.
    states: returns the names of the tensors like the parameter that it keeps for each kind, besides master weights, in
        the order of `KINDS`. `step`, its count of updates, is none of them.
    whole_matrices: needs the rows and columns of a matrix. No ZeRO stage has them, so such an optimizer is rejected.
    """

    build: Callable[[dict[str, dict[str, Any]], schema.Optimizer], Any]
    states: Callable[[schema.Optimizer], States]
    whole_matrices: bool = False


OPTIMIZERS: Table[Optimizer] = Table(
    Optimizer,
    {
        "adamw": Optimizer(
            build=lazy("engine.trainer.optimizer:adamw"), states=lambda settings: alike("exp_avg", "exp_avg_sq")
        ),
        "sgd": Optimizer(
            build=lazy("engine.trainer.optimizer:sgd"),
            states=lambda settings: alike("momentum_buffer") if settings.betas[0] else alike(),
        ),
    },
)


def states_of(settings: schema.Optimizer) -> dict[str, int]:
    """Return how many tensors an optimizer keeps per parameter of each kind, besides the master weight."""
    names = OPTIMIZERS[settings.name].states(settings)
    return {kind: len(names[kind]) for kind in KINDS}
