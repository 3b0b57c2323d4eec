"""The part of a model that one device stores, and the places in a layer where tensor parallelism communicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.config.schema import Model


@dataclass(frozen=True)
class Part:
    """Some consecutive layers of a model, and of each of their matrices one of `tp` slices.

    The first layers come with the embedding, the last ones with the final norm and the head.
    """

    layers: range  # numbers of layers in the whole model
    first: bool = True
    last: bool = True
    tp: int = 1
    tp_rank: int = 0  # which of the slices

    @classmethod
    def whole(cls, shape: Model) -> Part:
        """The part of a device that stores the whole model."""
        return cls(range(shape.layers))

    def vocab_rows(self, shape: Model) -> int:
        """Return the rows of a slice of the embedding or the head, with the padding at the end of the vocabulary."""
        return -(-shape.vocab // self.tp)


class Enter(Protocol):
    """Called before products with matrices that are split by their outputs."""

    def __call__(self, x: Tensor, tokens: int | None = None) -> Tensor:
        """Return the first `tokens` rows of all devices from this device's rows x; None for all rows, with padding."""


def as_it_is(x: Tensor, tokens: int | None = None) -> Tensor:
    """Return x: without tensor parallelism a device has all rows. Also for `leave`, after products with matrices that
    are split by their inputs."""
    return x
